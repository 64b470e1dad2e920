"""Whole runs of burnish beside another trainer's: do they learn alike? Each side's interpreter imports this package."""
