"""What a node is, and whether a job would fit it: asked before anything is started there."""
