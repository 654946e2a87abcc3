# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="misc,no-any-return"
"""`jit`: Triton's, for kernels that the host launches many times per step.

To choose the compiled variant of a launch, Triton binds the arguments, looks at each of them and serializes what it
found, which takes most of the host's time. A kernel of this module remembers the variants that it has launched.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton import jit as triton_jit
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ALIGNMENT = 16  # bytes: Triton compiles wider loads for pointers that are multiples of it


class LaunchedFunction(JITFunction):
    """A kernel that finds its compiled variants by the types of its tensors, its other arguments and its constants."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self._variants: dict[Any, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {}
        self._keyed = [number for number, param in enumerate(self.params) if not param.do_not_specialize]

    def run(self, *args, grid, warmup, **constants):
        """Launch the kernel. `args` are its first parameters; `constants` the others and the compiler's options."""
        active = driver.active
        device = active.get_current_device()
        keyed = [getattr(args[number], "dtype", args[number]) for number in self._keyed if number < len(args)]
        key = device, *keyed, *constants.items()
        variant = None if warmup else self._variants.get(key)
        if variant is not None:
            kernel, rest, pointers = variant
            if all_aligned(args, pointers):
                kernel[(*grid, 1, 1)[:3]](*args, *rest, stream=active.get_current_stream(device))
                return kernel
        kernel = super().run(*args, grid=grid, warmup=warmup, **constants)
        pointers = tuple(number for number, arg in enumerate(args) if isinstance(arg, Tensor) and self._aligned(number))
        if kernel is not None and not warmup and all_aligned(args, pointers):  # None: a hook does not compile it
            rest = tuple(constants.get(param.name, param.default) for param in self.params[len(args) :])
            self._variants[key] = kernel, rest, pointers
        return kernel

    def _aligned(self, number: int) -> bool:
        """Whether a variant may rely on the alignment of this pointer."""
        param = self.params[number]
        return not (param.do_not_specialize or param.do_not_specialize_on_alignment)


def all_aligned(args: Sequence[Any], pointers: Sequence[int]) -> bool:
    together = 0
    for number in pointers:
        together |= args[number].data_ptr()
    return together % ALIGNMENT == 0


def jit(**options: Any) -> Callable[[Callable[..., Any]], JITFunction]:
    """Decorate a kernel that the host launches, with the options of `triton.jit`."""
    if knobs.runtime.interpret:
        return triton_jit(**options)
    return lambda function: LaunchedFunction(function, **options)
