"""A double of the package with the operators of Neuron's compiler."""
