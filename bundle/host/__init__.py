"""What processes and files of a host may do, whatever a bundle is."""
