"""How repositories name their GGUF files: by the quantization of the weights, Q4_K_M for example."""

import re
from collections.abc import Sequence

from phase0_request.support.checks import ConfigError

KIND = re.compile(r"[-._/]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?:-\d+-of-\d+)?\.gguf$", re.IGNORECASE)


def file_of_kind(repository: str, kind: str, names: Sequence[str]) -> str:
    """The one file of a quantization. ConfigError says what the repository has, if there is none or more than one."""
    models = {name: found[1] for name in names if "mmproj" not in name and (found := KIND.search(name))}
    fitting = sorted(name for name, its in models.items() if its.upper() == kind.upper())
    if not fitting:
        has = ", ".join(sorted(set(models.values()))) or "no GGUF file that names its quantization"
        raise ConfigError(f"{repository} has no GGUF file of {kind}; it has {has}")
    if len(fitting) > 1:
        raise ConfigError(
            f"{repository} has {len(fitting)} files of {kind}: {', '.join(fitting)}. This engine reads one: download "
            "what you mean, join its parts with `llama-gguf-split --merge`, and name the file"
        )
    return fitting[0]
