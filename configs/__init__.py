"""Models, clusters and jobs as YAML, loadable by name (perfmodel/profile/catalog.py), and batch scripts.

The first lines of a file say where it is from. In clusters each further constant has its source beside it, or the word assumed,
chosen or guessed; in jobs batch, micro-batch and layout are ours where nothing is said of them.
"""
