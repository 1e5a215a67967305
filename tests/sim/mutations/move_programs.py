"""Programs that show planted bugs of collectives that tests/support/moves.py describes."""

from sim_machine import LL16

from kccl.plan.specs import BY_NAME

from .program import NARROW, Program

# Elements or bytes. Packets go in rounds of 64 elements; the parts of the staging have 256 bytes.
_COUNTS = (2, 37, 150, 3, 300, 64)


def _calls(kernel):
    """Alternately in place and not, by another root each time. After every second one a call by
    packets, which order nothing, so that the next uses the same staging.
    """
    collective = BY_NAME[kernel].collective

    def make(script):
        script.begin(threads=2 * script.machine.warp_size)
        for number, count in enumerate(_COUNTS):
            call = getattr(script, collective)
            for again in range(2):
                call(0, kernel, count, number + again, in_place=number % 2 == 0)
            script.all_reduce(0, LL16, 2)

    return make


PROGRAMS = {
    kernel: Program(_calls(kernel), 3, (kernel, LL16), NARROW)
    for kernel in (
        "all_to_all_direct_ll16",
        "all_to_all_push_simple",
        "reduce_direct_ll16",
        "reduce_pairwise_ll16",
        "reduce_two_shot_push_simple",
        "gather_direct_ll16",
        "gather_push_simple",
        "scatter_direct_ll16",
        "scatter_push_simple",
        "scan_direct_ll16",
        "scan_push_simple",
    )
}
