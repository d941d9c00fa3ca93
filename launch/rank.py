"""One rank process: ``python -m launch.rank RUN_DIR RANK``, started by :mod:`launch.spawn`.

Nothing heavy may be imported on this path: the tokenizer and its library stay in the front process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import NoReturn


def main() -> None:
    run_dir, rank = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=end_with_parent, args=(run_dir,), daemon=True).start()

    about = json.loads((run_dir / f"rank{rank}.json").read_text(encoding="utf-8"))
    be_rank(about, (run_dir / "engine.json").read_text(encoding="utf-8"))
    leave(0)


def be_rank(about: dict, engine: str) -> None:
    """Run a worker to its end; ``about`` holds the fields of ``RankInfo``, ``engine`` is an engine config's JSON."""
    from epmoe.config import EngineConfig, RankInfo
    from epmoe.engine import worker

    worker.run(RankInfo(**about), EngineConfig.from_json(engine))


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's tear-down, which can abort where threads of libraries still run."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # none where the shell closed it
        stream.flush()
    os._exit(code)


def end_with_parent(run_dir: Path) -> None:
    """Standard input ends when the process that started this one does, even if it was killed."""
    while os.read(0, 1):
        pass
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
