"""The categories of a profile, in their order, and the colors in which they are drawn."""

CATEGORIES = ("compute", "copy", "load", "reduce", "wait", "other")
COLORS = ("#1f6fb4", "#8fbfe3", "#2e8b57", "#8e6bb0", "#e8862e", "#c9ccd1")
