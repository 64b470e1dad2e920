"""vLLM as a rollout engine: vLLM runs the model, burnish draws the tokens and proves that the weights arrive.

    arguments     from the configuration to vLLM's engine arguments
    requests      from rollout requests to vLLM's, and back
    engine        `VLLMRollout`, the engine that a run sees; it holds one `core.Core`
    in_process    a core in this process (``mode=sync``)
    process       a core in processes of its own (``mode=async``)
    transports    how weights reach a process that shares memory (`broadcast`: one that shares none; `receiver`: its side)
    standalone    engines in another pool, filled by broadcast
    extension     what runs inside vLLM's workers: the sampler, and the weights

Nothing here is imported before the engine is chosen, and vLLM itself only when one is made.
"""
