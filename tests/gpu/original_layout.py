"""InternVL2.5-8B as its authors published it, at its real size with random weights: written, started, verified.

    python -m tests.gpu.original_layout [--folder FOLDER] [--small]

Prints one JSON line: what writing took, and of the start the seconds of each stage and what loading did. With `--small`
the model has two narrow layers and runs on a CPU. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import orchestrator
from orchestrator.originals.internvl_chat import native_config
from tests.gpu.write_checkpoint import Tensor, write_weights
from tests.original_folders import MARKS, TURNS, published, write_internlm2_tokenizer

_PIECES = 92544
_FIRST_MADE_UP = 259
_BYTE, _CONTROL, _UNKNOWN = 6, 3, 2

CONFIG: dict[str, Any] = {
    "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {
        "architectures": ["InternLM2ForCausalLM"],
        "bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 2.0, "type": "dynamic"},
        "rope_theta": 1000000,
        "vocab_size": 92553,
    },
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "model_type": "internvl_chat",
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internvl2_5",
    "torch_dtype": "bfloat16",
    "use_thumbnail": True,
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 448,
        "intermediate_size": 4096,
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
    },
}
"""What is known of config.json of OpenGVLab/InternVL2_5-8B, as far as a start reads it."""

_NARROW_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
_NARROW_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def config(*, small: bool) -> dict[str, Any]:
    if not small:
        return CONFIG
    text = {**CONFIG["llm_config"], **_NARROW_TEXT, "num_key_value_heads": 2}
    return {**CONFIG, "llm_config": text, "vision_config": {**CONFIG["vision_config"], **_NARROW_VISION}}


def write(folder: Path, given: dict[str, Any]) -> int:
    """Write the folder of a published configuration; the bytes of its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(given))
    (folder / "tokenizer.model").write_bytes(_tokenizer())
    write_internlm2_tokenizer(
        folder, {_PIECES - len(TURNS) + place: name for place, name in enumerate((*TURNS, *MARKS))}
    )
    native = native_config(given, image_token_id=_PIECES + 2, tied=False)
    make: Any = transformers.InternVLForConditionalGeneration
    with torch.device("meta"):
        model = make._from_config(transformers.InternVLConfig.from_dict(native), dtype=torch.bfloat16)
        tensors = published(model, packed=True)
    return write_weights(
        folder, [Tensor(name, tuple(each.shape), each.nbytes) for name, each in tensors.items()], torch.bfloat16
    )


def _tokenizer() -> bytes:
    """A SentencePiece model of the real size: the bytes, and words that no text is made of."""
    special = [_piece("<unk>", _UNKNOWN), _piece("<s>", _CONTROL), _piece("</s>", _CONTROL)]
    known = [*special, *(_piece(f"<0x{byte:02X}>", _BYTE) for byte in range(256))]
    made_up = (_piece(f"\u2581word{place}") for place in range(_FIRST_MADE_UP, _PIECES))
    # The trainer's settings: byte pairs, bytes for unknown characters; the normaliser's: no blank in front, none taken.
    settings = _field(2, b"\x18\x02\x98\x02\x01") + _field(3, b"\x18\x00\x20\x00")
    return b"".join([*known, *made_up]) + settings


def _piece(text: str, kind: int = 1) -> bytes:
    return _field(1, _field(1, text.encode()) + b"\x15" + struct.pack("<f", -1e6) + bytes([0x18, kind]))


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, of fewer than 128, in a protocol buffer."""
    return bytes([number << 3 | 2, len(content)]) + content


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.original_layout")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/internvl2_5_8b_original"))
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    try:
        print(json.dumps(_measure(arguments.folder, small=arguments.small)))
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)


def _measure(folder: Path, *, small: bool) -> dict[str, Any]:
    start = time.perf_counter()
    size = write(folder, config(small=small))
    written_s = time.perf_counter() - start
    overrides = ["model=internvl2_5_8b", f"model.path={folder}", f"run.dir={folder / 'run'}"]
    if small:
        overrides += ["device=cpu", "model.dtype=float32", "kv.bytes=need", "scheduler.max_num_seqs=2"]
        overrides += [
            "scheduler.max_model_len=4096",
            "scheduler.max_num_batched_tokens=512",
            "mm.limit_per_prompt.image=0",
        ]
        overrides += ["stages.verify.num_requests=1", "stages.verify.max_tokens=2"]
    else:
        overrides += ["device=cuda", "gpu.util=0.9", "scheduler.max_num_batched_tokens=8192"]
    with orchestrator.start(overrides) as started:
        record = started.record
    loaded = record.stages[0].metrics
    return {
        "bytes": size,
        "write_s": round(written_s, 3),
        "status": record.status,
        "ready_s": record.ready_s,
        "stages": {stage.slot: [stage.status, stage.wall_s] for stage in record.stages},
        "load": {key: value for key, value in loaded.items() if isinstance(value, int | float | str)},
    }


if __name__ == "__main__":
    main()
