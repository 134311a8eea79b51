"""Models, clusters and jobs as YAML, loadable by name (perfmodel/catalog.py), and batch scripts."""
