"""``python -m tools.prove_gpu``, or ``make prove-gpu``: everything that only a GPU can prove, in one command.

Parts run one after the other, or those that are named, each with a time limit of its own, so that one failure does not
lose the rest. What a part takes from what an earlier one left, such as the build, lies under build/, so that each may
be called by itself. It takes torch with CUDA, nvcc, ninja and what ``wheels`` brought along; no network, no git.
"""
