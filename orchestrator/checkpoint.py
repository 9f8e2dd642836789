"""A model folder, read as far as its headers, and what is refused before anything is loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import ModelConfig
from orchestrator.errors import CheckpointError, ConfigError
from orchestrator.model_folder import ModelMaker, find_folder, folder_here, refuse_missing_weights
from orchestrator.originals import internvl_chat, internvl_tensors
from orchestrator.tensorfile import FLOAT8, FLOAT_NAMES, TensorEntry, find_weight_files, read_headers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Checkpoint:
    """A model folder.

    Attributes:
        folder: where it is.
        config: its config.json.
        weight_files: safetensors files in the order of the index; none for `load_format=dummy`.
        tensors: what the weight files hold, file after file, in the order of their bytes.
        total_bytes: of all tensors, as stored.
        dtype: the element type that `dtype=auto` means: the one config.json names, else the one most weights have.
        identity: a fingerprint of the configuration and the weight files.
        native: where the layout is its authors' own, a folder of small files as transformers reads them, once written.
    """

    folder: Path
    config: dict[str, Any] = field(repr=False)
    weight_files: tuple[Path, ...]
    tensors: tuple[TensorEntry, ...] = field(repr=False)
    total_bytes: int
    dtype: str
    identity: str
    native: Path | None = None

    @property
    def described_in(self) -> Path:
        """The folder of the configuration, the tokenizer and the processor that transformers is to read."""
        return self.native or self.folder

    @property
    def is_original(self) -> bool:
        """Whether the layout is its authors' own, and known here."""
        return str(self.config["model_type"]) == internvl_chat.MODEL_TYPE


def locate(model: ModelConfig, *, make: Callable[[str], ModelMaker], cache_dir: Path) -> Checkpoint:
    """Find, fetch or make the model's folder, and read its headers.

    Args:
        model: which model; without a path, the one that `make(model.name)` makes, once, under `cache_dir`.
        make: gives the maker of a name.
        cache_dir: where made models are kept.

    Raises:
        UserError: no such model, or weights that are missing, cut off or in a format that is not read.
    """
    folder = find_folder(model, make=make, cache_dir=cache_dir)
    with _naming(model, folder):
        config = _read_config(folder)
        files = find_weight_files(folder) if model.load_format == "auto" else ()
        if model.load_format == "auto" and not files:
            raise refuse_missing_weights(folder)
        tensors = read_headers(files)
        if config["model_type"] == internvl_chat.MODEL_TYPE:
            internvl_chat.refuse_unknown(config)
            tensors = internvl_tensors.place(tensors, config)
    return Checkpoint(
        folder=folder,
        config=config,
        weight_files=files,
        tensors=tensors,
        total_bytes=sum(entry.nbytes for entry in tensors),
        dtype=_dtype(config, tensors),
        identity=_identity(folder, files),
    )


def weight_files_here(model: ModelConfig) -> tuple[Path, ...]:
    """The weight files of a model, as far as they are on this machine; asks no hub and refuses nothing."""
    try:
        folder = folder_here(model)
        return find_weight_files(folder) if folder is not None else ()
    except CheckpointError:
        return ()


def check(checkpoint: Checkpoint, model: ModelConfig, dtypes: frozenset[str]) -> None:
    """Refuse what cannot be started.

    Args:
        dtypes: names of the element types that the device has.

    Raises:
        UserError: a quantised model, one that needs its own code, files that are missing, or an element type that the
            device lacks.
    """
    with _naming(model, checkpoint.folder):
        _refuse_quantised(checkpoint)
        _refuse_custom_code(checkpoint, model)
        _refuse_missing_files(checkpoint)
        _refuse_dtype(checkpoint, model, dtypes)


@contextmanager
def _naming(model: ModelConfig, folder: Path) -> Iterator[None]:
    """Begin a refusal with the field that the user gave."""
    try:
        yield
    except CheckpointError as error:
        if model.path is None:
            raise
        raise CheckpointError(f"model.path={model.path}: {str(error).removeprefix(f'{folder}: ')}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        if any(folder.glob("*.gguf")):
            raise refuse_missing_weights(folder)
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(f"{folder}: holds an adapter and no model; give the model, with the adapter merged")
        raise CheckpointError(f"{folder}: has no config.json; give a model folder as transformers writes it")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); copy or download it again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path}: has no model_type, so no class is known for it; copy or download it again")
    return config


def _parts(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration and those nested in it (`text_config`, `vision_config`, ...)."""
    yield "config.json", config
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            yield key, value


def _dtype(config: dict[str, Any], tensors: Sequence[TensorEntry]) -> str:
    for _, part in _parts(config):
        named = part.get("dtype") or part.get("torch_dtype")
        if isinstance(named, str):
            return named.removeprefix("torch.")
    stored: Counter[str] = Counter()
    for entry in tensors:
        stored[FLOAT_NAMES.get(entry.dtype, "")] += entry.nbytes
    del stored[""]
    return stored.most_common(1)[0][0] if stored else "float32"


def _identity(folder: Path, files: Sequence[Path]) -> str:
    """Reads little: a changed weight file is told by its header, its size and the two ends of its tensors."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(length + _SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    for where, part in _parts(checkpoint.config):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part.get(key), dict):
                method = part[key].get("quant_method", "an unnamed method")
                raise CheckpointError(
                    f"{checkpoint.folder}: is quantised with {method} ({key} in {where}), which is not supported; "
                    "give the model it was made from, in float32, float16 or bfloat16"
                )
    narrow = next((entry for entry in checkpoint.tensors if entry.dtype in FLOAT8), None)
    if narrow is not None:
        raise CheckpointError(
            f"{checkpoint.folder}: the tensor '{narrow.name}' is stored as {narrow.dtype}, a quantised type, which is "
            "not supported; give the model it was made from, in float32, float16 or bfloat16"
        )


def _refuse_custom_code(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Code that came with the weights is never run: the engine replaces attention calls, which only transformers' own
    classes offer. Where transformers has a class for the model's type, that one is used and the code is left alone."""
    auto_map = checkpoint.config.get("auto_map")
    model_type = checkpoint.config["model_type"]
    if not auto_map or checkpoint.is_original or _has_native_class(model_type):
        return
    names = auto_map.values() if isinstance(auto_map, dict) else []
    code = ", ".join(sorted({f"{str(name).rpartition('--')[2].partition('.')[0]}.py" for name in names}))
    switch = (
        "model.trust_remote_code=true does not change that"
        if model.trust_remote_code
        else "model.trust_remote_code=false, and true would not make it run either"
    )
    raise CheckpointError(
        f"{checkpoint.folder}: needs code of its own ({code}) for model_type={model_type}, which transformers has no "
        f"class for, and such code is not run ({switch}); give a checkpoint converted to a transformers class, on hubs "
        "often the one whose name ends in -hf"
    )


def _has_native_class(model_type: str) -> bool:
    """Whether the installed transformers knows the type. Its table is read as text: to import it takes seconds."""
    package = importlib.util.find_spec("transformers")
    for root in (package.submodule_search_locations or []) if package else []:
        for table in ("auto_mappings.py", "configuration_auto.py"):
            path = Path(root, "models", "auto", table)
            if path.is_file() and f'("{model_type}", "' in path.read_text(encoding="utf-8"):
                return True
    return False


def _refuse_missing_files(checkpoint: Checkpoint) -> None:
    def absent(names: tuple[str, ...]) -> bool:
        return not any((checkpoint.folder / name).is_file() for name in names)

    media = ("vision_config", "audio_config")
    takes = [key.removesuffix("_config") for key, _ in _parts(checkpoint.config) if key in media]
    if absent(_TOKENIZER_FILES):
        raise CheckpointError(
            f"{checkpoint.folder}: has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])} or another); copy or download it"
        )
    if takes and not checkpoint.is_original and absent(_PROCESSOR_FILES):
        raise CheckpointError(
            f"{checkpoint.folder}: the model takes {' and '.join(takes)} input and the folder has no "
            f"{' or '.join(_PROCESSOR_FILES)}; copy or download it"
        )


def _refuse_dtype(checkpoint: Checkpoint, model: ModelConfig, dtypes: frozenset[str]) -> None:
    wanted = checkpoint.dtype if model.dtype == "auto" else model.dtype
    if wanted in dtypes:
        return
    given = f" (auto: what {checkpoint.folder} has)" if model.dtype == "auto" else ""
    works = " or ".join(f"model.dtype={name}" for name in sorted(dtypes))
    raise ConfigError.of("model.dtype", f"the device has no {wanted}{given}; {works} would work", model.dtype)
