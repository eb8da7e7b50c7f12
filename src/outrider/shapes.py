"""The one legend of tensor shape suffixes.

A tensor's name ends in the letters of its dimensions, in order: ``target_logits_RV`` is
``[packed rows, target vocabulary]``. Used in ``sampling``, ``verify``, ``drafters``, ``models``, ``cache``.

====== ================================================================
letter dimension
====== ================================================================
``B``  sequences of a batch
``K``  draft positions of a chain
``T``  scored positions of one sequence in one pass
``N``  nodes of a proposal tree (the root is not a node)
``R``  packed rows of one pass, all sequences together
``S``  cached positions
``V``  target vocabulary
``U``  draft vocabulary
``D``  hidden width
``A``  taps (hidden states of chosen layers)
``L``  layers
``H``  query heads
``G``  key/value heads
``C``  head width
``F``  feed-forward width
====== ================================================================
"""

LEGEND: dict[str, str] = {
    "B": "sequences",
    "K": "draft positions",
    "T": "scored positions",
    "N": "tree nodes",
    "R": "packed rows",
    "S": "cached positions",
    "V": "target vocabulary",
    "U": "draft vocabulary",
    "D": "hidden width",
    "A": "taps",
    "L": "layers",
    "H": "query heads",
    "G": "key/value heads",
    "C": "head width",
    "F": "feed-forward width",
}
