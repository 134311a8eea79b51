"""Jobs on several hosts, which are network namespaces of this one: with a network, a name and a cable each."""
