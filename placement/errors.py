"""The one error type a user may see as a single line, and the errors of files that become it."""

import zipfile
import zlib

# What numpy raises on an .npy or .npz that is cut, changed or of another kind.
BROKEN_ARRAY = (OSError, ValueError, EOFError, KeyError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)


class UserError(ValueError):
    """A mistake of the caller: the message names the value, the rule and the remedy in one line.

    The command lines print it without a traceback and exit with code 2.
    """
