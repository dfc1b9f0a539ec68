"""Other computers: starting processes here and there, hosts that are reached, found, rented and planned for."""
