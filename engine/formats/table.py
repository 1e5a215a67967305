"""The table of all formats. engine/README.md says what a new one needs."""

from .base import Format, Plain
from .bfloat16 import BFLOAT16
from .e4m3 import E4M3
from .expanded import EXPANDED
from .float16 import FLOAT16
from .float32 import FLOAT32
from .ggml import Ggml
from .int4 import INT4, INT4_ZEROS
from .int8 import INT8, INT8_ZEROS
from .mxfp4 import MXFP4
from .nested4 import NESTED4
from .nested6 import NESTED6
from .nvfp4 import NVFP4
from .q4_0 import Q4_0
from .q4_1 import Q4_1
from .q4_k import Q4_K
from .q5_0 import Q5_0
from .q5_1 import Q5_1
from .q5_k import Q5_K
from .q6_k import Q6_K
from .q8_0 import Q8_0

_ALL: tuple[Format, ...] = (
    FLOAT32,
    FLOAT16,
    BFLOAT16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4_K,
    Q5_K,
    Q6_K,
    MXFP4,
    *EXPANDED,
    *E4M3,
    *INT8,
    *INT8_ZEROS,
    *INT4,
    *INT4_ZEROS,
    *NVFP4,
    *NESTED4,
    *NESTED6,
)

IN_FILES = {each.in_files: each for each in _ALL}
"""Format.in_files, the name in files -> format."""
OF_GGUF = {name: each for name, each in IN_FILES.items() if isinstance(each, Plain | Ggml)}
"""The formats that tensors in GGUF files may have, by their names in files."""
MULTIPLIED = {each.name: each for each in _ALL if each.tile_bytes}
"""Name -> format, for the formats that the monokernel multiplies. The host executor multiplies all
but those of formats/nested.py, to which the monokernel's blocks are converted without rounding."""
ON_HOST = {each.name: each for each in _ALL if each.is_on_host}
"""Name -> format, for the formats of blocks that the host executor multiplies as they are stored.
For the monokernel those that are not in MULTIPLIED are converted to a dtype."""
ROUNDED: dict[str, tuple[Format, ...]] = {
    "fp8": E4M3,
    "int8": INT8,
    "int4": INT4,
    "mxfp4": (MXFP4,),
}
"""Value of Engine's argument `weights` -> the formats to which weights of 16 or 32 bits are then
rounded. The format with the fewest scales comes first."""
DTYPES: dict[str, Plain] = {each.name: each for each in (BFLOAT16, FLOAT16)}
"""Name -> format, for the dtypes to which a model's matrices may be converted; the usual one first.
"""


def forms_of(stored: Format) -> tuple[Format, ...]:
    """Returns the formats of the monokernel that hold all numbers of a format of GGUF, but in other
    words. Those with the fewest bytes come first.
    """
    return tuple(each for each in (*NESTED4, *NESTED6) if each.holds(stored))
