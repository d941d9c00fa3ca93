"""``epmoe demo``: the embedded model on a few ranks, its placement solved at start-up from its own routing traces."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from launch import generate
from launch.args import Parser
from launch.hub import DEMO, DEMO_FOLDER
from launch.session import Starting

PROMPTS = (
    "To change the font of the selected text,",
    "The following options are available:",
    "Um die Schriftart des ausgewählten Textes zu ändern,",
    "Mit diesem Befehl wird die Datei",
    "Pour modifier la police du texte sélectionné,",
    "Cette commande affiche la liste des fichiers",
    "def get_model(self, name, default=None):\n",
    "import os\nimport sys\n\n\nclass ",
    "int\nmain (int argc, char **argv)\n{\n",
    "#include <stdio.h>\n\nstatic void\n",
    "// Close closes the file.\nfunc (f *File) Close() error {\n",
    "package main\n\nimport (\n",
)
NEXT = """
What to try next
  epmoe generate --model demo --prompt "Pour ouvrir le fichier," --ranks 4 --placement auto --trace demo
  epmoe generate --model demo --prompt "def main(" --ranks 2 --placement linear --deterministic
  epmoe-placement compare --trace {folder}/trace_german.npz --gpus 4
  epmoe-placement inspect {trace}     (the routing of the text above)
  epmoe generate --help, epmoe-placement --help, docs/life_of_a_token.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="rank processes (default 2)")
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens of each continuation (default 48)")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling noise (default 1)")


def run(args: argparse.Namespace, starting: Starting | None = None) -> int:
    parser = Parser(prog="epmoe demo", allow_abbrev=False)
    generate.add_arguments(parser)
    trace = Path(tempfile.gettempdir()) / f"epmoe-demo-trace-{os.getuid()}.npz"  # users share that folder
    words = ["--model", DEMO, "--ranks", str(args.ranks), "--placement", "auto", "--trace", DEMO]
    words += ["--max-tokens", str(args.max_tokens), "--temperature", "0.7", "--top-p", "0.9"]
    words += ["--seed", str(args.seed), "--record-trace", str(trace)]
    for prompt in PROMPTS:
        words += ["--prompt", prompt]
    code = generate.run(parser.parse_args(words), starting)
    print(NEXT.format(folder=DEMO_FOLDER, trace=trace))
    return code
