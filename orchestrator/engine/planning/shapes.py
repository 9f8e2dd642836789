"""Running a model on `meta` tensors, with every tensor's birth and death noted on a tape.

What a step computes does not matter to its memory, but for what data decide: how an encoder's windows lie follows from
an image's grid. So numbers that come from the host are carried along: a tensor that was copied over, and whatever is
computed from such tensors alone, has its values beside it, and what asks for a number (`item`, `tolist`, `nonzero`)
gets it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.engine.planning import kernels
from orchestrator.engine.planning.host import (
    VALUES,
    is_hollow,
    joined,
    like,
    makes_on_device,
    on_host,
    tensors,
    values_of,
)
from orchestrator.engine.planning.results import Results, module_above, refusal
from orchestrator.engine.planning.tape import Outline, Tape

_MOST_VALUES = 1 << 19
"""Elements of a tensor whose values are carried along."""
_MOVES = frozenset({"aten::resize_", "aten::set_"})
"""Operations that give their first argument other memory."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_COPY, _ITEM = torch.ops.aten._to_copy.default, torch.ops.aten._local_scalar_dense.default


class Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered (by `running`), operations on `meta` tensors take and give back memory by way of `tape`."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._adopted: int | None = None
        self._kinds: dict[Any, Callable[..., Any]] = {}
        self._invents = False
        self._results = Results()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self._kinds.get(func)
        if run is None:
            run = self._kinds[func] = self._kind(func)
        return run(func, args, kwargs or {})

    def _kind(self, func: Any) -> Callable[..., Any]:
        """How an operation is run; the same each time."""
        if func in (_COPY, _ITEM):
            return self._copy if func is _COPY else self._item
        if func is kernels.ATTENTION:
            return self._attention
        if func is kernels.LINEAR:
            return self._linear
        if func is kernels.INDEX:
            return self._indexed
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
            return self._decomposed
        if any(returned.alias_info is not None for returned in func._schema.returns):
            self._results.aliasing.add(func)
        if _writes_first_only(func._schema):
            return self._in_place
        return self._leaf

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # In inference mode operations come whole: what they allocate inside would not be seen.
        with self:
            return func.decompose(*args, **kwargs)

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        query, _, value, *rest = args
        masked = (rest[0] if rest else kwargs.get("attn_mask")) is not None
        if masked or not kernels.is_flash(query, value):
            with self:
                output = kernels.masked_attention(*args, **kwargs)
        else:
            # The kernel's other result, the logarithms of its sums, is dropped as soon as it is there.
            output = kernels.flash_attention(query, value)
            self._born(output)
            self._tape.give(self._tape.take(kernels.flash_sums_bytes(query)))
        self._tape.launched(1)
        return output

    def _linear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One product, with no copy of rows that lie one after the other."""
        given, weight, *bias = args
        if kwargs or not given.is_meta or not (given.ndim == 2 or given.is_contiguous()):
            return self._decomposed(func, args, kwargs)
        output = torch.empty((*given.shape[:-1], weight.shape[0]), dtype=given.dtype, device="meta")
        self._born(output)
        self._tape.use_workspace("cublaslt" if bias and bias[0] is not None else "cublas")
        self._tape.launched(1)
        return output

    def _indexed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Masks become the places that they select, as on a GPU; one whose numbers are not known selects everything."""
        source, indices = args
        if not source.is_meta or not any(index is not None and index.dtype == torch.bool for index in indices):
            return self._leaf(func, args, kwargs)
        places: list[Any] = []
        for index in indices:
            is_mask = index is not None and index.dtype == torch.bool
            places += self._selected(index) if is_mask else [index]
        return self._leaf(func, (source, places), kwargs)

    def _selected(self, mask: torch.Tensor) -> list[torch.Tensor]:
        known = values_of(mask) if mask.is_meta else mask
        if known is None:
            self._tape.assumed(f"every element is selected by a mask in {module_above() or 'no module'}")
            known = torch.ones(mask.shape, dtype=torch.bool)
        places: list[torch.Tensor] = []
        for numbers in known.nonzero(as_tuple=True):
            places.append(numbers.to("meta"))
            self._born(places[-1])
            setattr(places[-1], VALUES, numbers)
        return places

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = kwargs.get("device")
        source = args[0]
        if not source.is_meta:
            output = func(*args, **kwargs)
            if target is not None and output.is_meta:
                self._born(output)
                if not source.is_floating_point() and source.numel() <= _MOST_VALUES:
                    setattr(output, VALUES, source.to(output.dtype, copy=True))
            return output
        if target is not None and torch.device(target).type != "meta":
            return self._values_of(source, func).to(kwargs.get("dtype") or source.dtype, copy=True)
        return self._leaf(func, args, kwargs)

    def _item(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        return func(self._values_of(source, func) if source.is_meta else source)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What a step must run in."""
        with _Literals(), self:
            yield

    @contextmanager
    def inventing(self) -> Iterator[None]:
        """Numbers that are asked for meanwhile, and not known, are zeros: nothing depends on them."""
        before, self._invents = self._invents, True
        try:
            yield
        finally:
            self._invents = before

    def _values_of(self, tensor: torch.Tensor, func: Any) -> torch.Tensor:
        values: torch.Tensor | None = getattr(tensor, VALUES, None)
        if values is None and self._invents:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        if values is None:
            raise refusal(func, "asks for numbers that only a device would have")
        return values

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that only writes into its first argument: nothing is made."""
        target = args[0]
        if not target.is_meta:
            return func(*args, **kwargs)
        self._launched(func, args, True)
        if hasattr(target, VALUES):
            inputs = list(tensors((*args, *kwargs.values())))
            if self._is_known(func, args, kwargs, inputs):
                on_host(func, args, kwargs)
            else:
                delattr(target, VALUES)
        return target

    def _leaf(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = list(tensors((*args, *kwargs.values())))
        if func is kernels.JOIN and inputs and all(is_hollow(tensor) for tensor in inputs):
            return joined(*args, **kwargs)
        is_known = self._is_known(func, args, kwargs, inputs)
        if func in kernels.DATA_DECIDES and is_known:
            output = like(on_host(func, args, kwargs))
        else:
            output = self._results.run(func, args, kwargs)
        made = list(tensors((output,)))
        allocated = False
        for tensor in made:
            if tensor.is_meta:
                allocated |= self._born(tensor)
        if allocated or any(tensor.is_meta for tensor in inputs):
            self._launched(func, args, allocated)
        if is_known and all(tensor.numel() <= _MOST_VALUES for tensor in made):
            values = on_host(func, args, kwargs)
            for tensor, known in zip(made, tensors((values,)), strict=True):
                setattr(tensor, VALUES, known)
        return output

    def _is_known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]) -> bool:
        """Whether the result follows from numbers that are carried along."""
        on_device = [tensor for tensor in inputs if tensor.is_meta]
        if inputs:
            return bool(on_device) and all(hasattr(tensor, VALUES) for tensor in on_device)
        return makes_on_device(kwargs) and kernels.makes_integers(func, args, kwargs)

    def _born(self, tensor: torch.Tensor) -> bool:
        """Take memory for a tensor's storage, if that is new; whether it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        size = storage.nbytes()
        if size:
            number = self._tape.take(size) if self._adopted is None else self._adopted

            def gone(_: Any) -> None:
                del self._live[key]
                self._tape.give(number)

            self._live[key] = weakref.ref(storage, gone), number
        return bool(size)

    def hold(self, model: torch.nn.Module) -> None:
        """A model's tensors are there, and take nothing of the device."""
        with self._tape.uncounted():
            for tensor in (*model.parameters(), *model.buffers()):
                self._born(tensor)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """What the tape calls a tensor's memory; None for memory that it does not know."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def adopt(self, number: int, outline: Outline) -> torch.Tensor:
        """A tensor over memory that the tape has taken."""
        before, self._adopted = self._adopted, number
        try:
            whole = torch.empty(outline.elements, dtype=outline.dtype, device="meta")
        finally:
            self._adopted = before
        return whole.as_strided(outline.size, outline.stride, outline.offset)

    def _launched(self, func: Any, args: tuple[Any, ...], allocated: bool) -> None:
        library = kernels.library_of(func, args)
        if library is not None:
            self._tape.use_workspace(library)
        if scratch := kernels.scratch_bytes(func, args):
            self._tape.give(self._tape.take(scratch))
        if (allocated or func._schema.is_mutable) and func not in kernels.NOT_KERNELS:
            self._tape.launched(1)


class _Literals(TorchFunctionMode):
    """`torch.tensor` on `meta` forgets the numbers that it is given: they take the way over the host, as on a GPU. And
    pictures are resized by one kernel."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and makes_on_device(kwargs):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        made = kernels.resized(*args, **kwargs) if func is kernels.RESIZE else None
        return func(*args, **kwargs) if made is None else made


def _writes_first_only(schema: Any) -> bool:
    written = [at for at, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write]
    return written == [0] and len(schema.returns) == 1 and schema.name.endswith("_") and schema.name not in _MOVES
