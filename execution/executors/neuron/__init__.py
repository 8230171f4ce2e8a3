"""Runs NEFFs on NeuronCores through the C library of AWS's Neuron runtime, libnrt."""
