"""Models, clusters and jobs as YAML, and traces of failures, all found by name; and batch scripts.

perfmodel/profile/catalog.py loads the former, odyssey_cli/replay/traces.py reads traces.

The first lines of a file say where it is from. In clusters each further constant has its source beside it, or the word assumed,
chosen or guessed; in jobs batch, micro-batch and layout are ours where nothing is said of them.
"""
