"""What the rows of the simulator's matrix share: lengths, and which kernels a call takes."""

from kccl.plan.specs import SPECS

# In bytes. None: an odd number of elements, or of bytes for a call that counts bytes.
SIZES = {"0": 0, "8": 8, "odd": None, "8K": 8192, "64K": 65536}
_ODD = 37
# The staging is short, so a message takes more rounds through it than in packets.
_MOST_ROUNDS = 64


def num_elements(script, size):
    """Elements of a message of one of SIZES."""
    itemsize = script.inputs(1)[0].itemsize
    return _ODD if SIZES[size] is None else SIZES[size] // itemsize


def num_bytes(size):
    """Bytes of a message of one of SIZES, for a call that counts bytes."""
    return _ODD if SIZES[size] is None else SIZES[size]


def kernels_of(collective):
    """The kernels among which a call of the collective chooses on GPUs, and so on the simulator."""
    return [spec for spec in SPECS if spec.collective == collective and "sim" in spec.targets]


def any_of(collective, script, rng, nbytes, num_parts):
    """Any of its kernels; one that stages the message only if its part takes few rounds."""
    specs = kernels_of(collective)
    spec = specs[rng.integers(len(specs))]
    is_short = nbytes <= _MOST_ROUNDS * script.machine.staging_bytes // num_parts
    return (spec if is_short or not stages(spec) else specs[0]).name


def stages(spec):
    """Whether long messages go through the staging in rounds, without packets."""
    return spec.protocol == "simple"
