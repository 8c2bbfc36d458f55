"""What graphs tell of their values, before they are optimized: all from one rule for each operation.

``rules`` is the table of these rules, ``shapes`` reads shapes and indices, and ``graphs`` walks and
rewrites graphs. ``rows`` tells how values depend on the number of rows, and along which axis rows are.
From these, ``result_dependence`` tells on which inputs results depend, and along which of them loops
run; ``difference_causes`` why parts of the rows do not give a result; ``windows`` which rows an index
selects; and ``fixed_rows`` frees graphs from constant numbers of rows.
"""
