"""Other networks than loopback: links of a known rate between namespaces, and several machines."""
