"""Arguments that several commands share, and what they mean for the engine and for sampling."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from epmoe.config import EngineConfig, check_engine
from epmoe.engine.request import SamplingParams
from epmoe.model_config import ModelConfig
from launch.env import cores, has_gpu, tuned_file
from launch.hub import resolve_model
from launch.recording import RECORD_TOKENS
from launch.session import Starting
from placement.errors import UserError

GPU_BLOCK_SIZE = 64  # attention's tiles of keys: whole blocks come by the copy engine
SAMPLING = {  # option -> (SamplingParams field, type, help)
    "--max-tokens": ("max_tokens", int, "most tokens to generate for a prompt (default 64)"),
    "--temperature": ("temperature", float, "0 takes the most likely token (default 0)"),
    "--top-k": ("top_k", int, "sample among the k most likely tokens"),
    "--top-p": ("top_p", float, "sample among the fewest tokens whose probabilities sum to p"),
    "--min-p": ("min_p", float, "leave out tokens less likely than p times the most likely"),
    "--repetition-penalty": ("repetition_penalty", float, "divides the logits of tokens seen before"),
    "--presence-penalty": ("presence_penalty", float, "subtracted from the logits of tokens generated before"),
    "--frequency-penalty": ("frequency_penalty", float, "the same, once for each time"),
    "--n": ("n", int, "continuations of each prompt (default 1)"),
    "--logprobs": ("logprobs", int, "log-probabilities of each token and of this many likeliest ones, in --json"),
    "--seed": ("seed", int, "makes sampling repeatable, whatever the batch and placement"),
}
ENGINE = {  # option -> (EngineConfig field, type, help)
    "--device": ("device", str, "cpu or cuda (default: cuda where there is a GPU)"),
    "--combine": ("combine", str, "exact: placement never changes a token; reduce: fewer bytes, equal to rounding"),
    "--exchange": ("exchange", str, "how rows travel: auto (default), alltoall, oneshot, padded or p2p"),
    "--wire": ("wire", str, "rows on their way to the experts: model, or fp8 (half the bytes)"),
    "--capacity-factor": ("capacity_factor", float, "padded: rows per pair of ranks over an even share; 0: all"),
    "--exchange-costs": ("exchange_costs", str, "file of bench_exchange.py --calibrate, which auto goes by"),
    "--overlap": ("overlap", str, "two micro-batches, one computes while one travels: on, off (default), auto"),
    "--max-batch-tokens": ("max_batch_tokens", int, "token budget of a rank and step"),
    "--max-requests": ("max_requests", int, "requests a rank runs at once"),
    "--max-model-len": ("max_model_len", int, "most tokens of a request, prompt and output"),
    "--block-size": ("block_size", int, "tokens of a KV block"),
    "--num-blocks": ("num_blocks", int, "KV blocks of a rank"),
    "--probe-tokens": ("probe_tokens", int, "run so much of a prompt, then move it to the rank of its experts"),
    "--stall-seconds": ("stall_seconds", int, "end the run when a rank makes no progress for so long (default 300)"),
    "--tuned": ("tuned", str, "file of epmoe tune, or off (default: the one in the user's cache folder, if any)"),
    "--threads": ("threads", int, "threads of a rank (default: cores / ranks)"),
}
CHOSEN_ELSEWHERE = {  # EngineConfig fields that a setting would not reach -> what chooses them
    "model": "--model",
    "ranks": "--ranks or ranks=",
    "plan": "--placement or placement=",
    "affinity": "a plan file that names it",
    "record_tokens": "--record-tokens or record_tokens=",
    "timeline": "--timeline",
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and no usage text."""

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see {self.prog} --help")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of a checkpoint, a hub id, or demo (in the package)")
    parser.add_argument("--ranks", type=int, help="number of rank processes (default 1; torchrun says it itself)")


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--placement", default="linear", help="linear, round-robin, greedy, auto, or a plan file (default linear)"
    )
    parser.add_argument(
        "--trace", nargs="+", metavar="FILE", help="routing traces that greedy and auto solve for; demo: the package's"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--config", help="JSON file of engine settings; options given here come first")
    group.add_argument("--dtype", help="float32, bfloat16, float16, or auto: float32 on CPU, the model's own on a GPU")
    group.add_argument("--deterministic", action="store_true", help="bitwise equal output for any ranks and batching")
    group.add_argument("--no-graphs", action="store_true", help="on a GPU: decode steps without CUDA graphs")
    for option, (_, kind, text) in ENGINE.items():
        group.add_argument(option, type=kind, help=text)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for option, (_, kind, text) in SAMPLING.items():
        group.add_argument(option, type=kind, help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    group.add_argument(
        "--stop-token-id", action="append", default=[], type=int, metavar="ID", help="ends the output; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What was given; greedy and 64 tokens where nothing was."""
    fields = {"max_tokens": 64, "temperature": 0.0, "stop": tuple(args.stop), "ignore_eos": args.ignore_eos}
    fields["stop_token_ids"] = tuple(args.stop_token_id)
    return SamplingParams.from_dict(fields | _given(args, SAMPLING))


def add_recording_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record-trace", metavar="FILE", help="write the routing of this run's tokens there (.npz)")
    add_record_tokens(parser)


def add_record_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record-tokens",
        type=int,
        default=RECORD_TOKENS,
        help=f"most tokens to record, over all ranks (default {RECORD_TOKENS})",
    )


def rank_count(args: argparse.Namespace) -> int:
    """W for ranks that are started here."""
    ranks = 1 if args.ranks is None else args.ranks
    if ranks < 1:
        raise UserError(f"--ranks is {ranks}; it must be at least 1")
    return ranks


def engine_config(args: argparse.Namespace, starting: Starting) -> tuple[EngineConfig, ModelConfig]:
    """The engine's and the model's configuration that the arguments ask for."""
    if args.ranks not in (None, starting.world):
        raise UserError(f"--ranks is {args.ranks}, torchrun started {starting.world} ranks; leave --ranks out")
    settings = {**_settings_file(args.config), **_given(args, ENGINE)}
    if args.deterministic:
        settings["deterministic"] = True
    if args.no_graphs:
        settings["graphs"] = False
    if args.dtype is not None:
        settings["dtype"] = args.dtype
    return complete_settings(args.model, settings, starting, args.config or "engine config")


def complete_settings(
    name: str, settings: dict, starting: Starting, source: str = "engine config"
) -> tuple[EngineConfig, ModelConfig]:
    """The configurations of model ``name`` on the ranks of ``starting``; what is not set follows from the machine."""
    for key, option in CHOSEN_ELSEWHERE.items():
        if key in settings:
            raise UserError(f"{source} sets {key}, which is chosen by {option}; leave it out")
    folder = resolve_model(name)
    model = ModelConfig.from_folder(folder)
    settings = {**settings, "model": str(folder), "ranks": starting.world}
    settings.setdefault("device", "cuda" if has_gpu() else "cpu")
    on_cpu = settings["device"] == "cpu"
    settings.setdefault("combine", "exact" if on_cpu or settings.get("deterministic") else "reduce")
    if settings.setdefault("dtype", "auto") == "auto":
        settings["dtype"] = "float32" if on_cpu else model.dtype
    settings.setdefault("exchange", "auto")
    settings.setdefault("threads", max(1, cores() // starting.local_world))
    settings.setdefault("block_size", EngineConfig.block_size if on_cpu else GPU_BLOCK_SIZE)
    settings.setdefault("capture_at_start", not on_cpu and settings.get("graphs", True))
    settings.setdefault("max_model_len", _default_length(settings, model))
    settings["tuned"] = _tuned_text(settings.get("tuned"), on_cpu)
    if settings.get("exchange_costs") is not None:
        settings["exchange_costs"] = _costs_text(str(settings["exchange_costs"]))
    engine = EngineConfig.from_dict(settings, source)
    check_engine(engine, model)
    return engine, model


def _default_length(settings: dict, model: ModelConfig) -> int:
    """The engine's default, where neither the model's positions nor the KV blocks end before it."""
    blocks, size = settings.get("num_blocks"), settings["block_size"]
    held = blocks * size if isinstance(blocks, int) and isinstance(size, int) else EngineConfig.max_model_len
    return max(1, min(EngineConfig.max_model_len, model.max_position_embeddings, held))


def _tuned_text(asked: object, on_cpu: bool) -> str | None:
    """Text of the tuned tiles: of the file asked for, or on a GPU of the user's own if there is one. On a CPU none; a
    file that is asked for is checked."""
    if asked == "off" or (asked is None and (on_cpu or not tuned_file().is_file())):
        return None
    from launch.tune import read_tuned

    text = read_tuned(tuned_file() if asked is None else str(asked)).to_json()
    return None if on_cpu else text


def _costs_text(path: str) -> str:
    """Text of a calibration of exchanges, checked."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read exchange costs {path}: {reason}; give a file of bench_exchange.py") from None
    from epmoe.moe.by_size import costs_from

    costs_from(text, path)
    return text


def _given(args: argparse.Namespace, options: dict) -> dict:
    values = {field: getattr(args, option.lstrip("-").replace("-", "_")) for option, (field, _, _) in options.items()}
    return {field: value for field, value in values.items() if value is not None}


def _settings_file(path: str | None) -> dict:
    if path is None:
        return {}
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read engine settings {path}: {error.strerror}; give a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); give an object of engine settings") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds {type(settings).__name__}; give an object of engine settings")
    return settings
