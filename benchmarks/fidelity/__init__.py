"""Does burnish do what the model and the loss say? Its samples and its gradients beside plain float32 ones."""
