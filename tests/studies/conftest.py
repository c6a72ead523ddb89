"""Figures are drawn without what takes most of the time: a search for the layout, and labels of ticks."""

from studies.analysis.figure import STYLE

STYLE |= {"figure.constrained_layout.use": False, "xtick.labelbottom": False, "ytick.labelleft": False}
