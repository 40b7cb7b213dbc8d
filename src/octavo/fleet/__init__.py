"""Several replicas of an engine behind one endpoint: routing, the link to other machines, providers of replicas."""
