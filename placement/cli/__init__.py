"""The command line ``epmoe-placement``: one file per command, ``add_parser`` and ``run`` in each."""
