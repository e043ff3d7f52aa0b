"""The studies of scripts/study.py: what a figure is made of, each with a table, a picture and a JSON document."""
