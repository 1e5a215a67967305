"""Planted bugs: what the simulator has to find, each as a change of the device source's text.

    make sim-mutations

A mutation names the program that shows it, the verdicts that count, and how many seeds it may take.
The source as it is passes the same programs under the same seeds.
"""

from . import (
    blocks,
    boards,
    chunks,
    dependents,
    edges,
    exchanges,
    experts,
    failures,
    grids,
    messages,
    moves,
    order,
    packets,
    parts,
    postings,
    results,
    words,
)

MUTATIONS = (
    *order.MUTATIONS,
    *packets.MUTATIONS,
    *chunks.MUTATIONS,
    *moves.MUTATIONS,
    *parts.MUTATIONS,
    *messages.MUTATIONS,
    *experts.MUTATIONS,
    *postings.MUTATIONS,
    *blocks.MUTATIONS,
    *exchanges.MUTATIONS,
    *boards.MUTATIONS,
    *grids.MUTATIONS,
    *words.MUTATIONS,
    *edges.MUTATIONS,
    *results.MUTATIONS,
    *failures.MUTATIONS,
    *dependents.MUTATIONS,
)
