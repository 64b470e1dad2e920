"""vLLM as a rollout engine: vLLM runs the model, burnish draws the tokens and proves that the weights arrive.

What a run sees, and how it asks:

    engine          `VLLMRollout`; it holds one `core.Core`
    arguments       from the configuration to vLLM's engine arguments (`installed`: is there a vLLM that fits)
    requests        from rollout requests to vLLM's, and back
    expected        what a stream of weights must bring

Where vLLM runs:

    in_process      in this process, ``mode=sync`` (`undisturbed`: its start changes nothing of the trainer's; `sleep_memory`)
    process         in processes of its own, ``mode=async`` (`launch`, `placement`, `arrivals`)
    standalone      in another pool, filled by broadcast
    engine_watch    whether those processes live (`engine_log`, `failures`: what their log says)
    server          elsewhere, ``mode=server`` (`http_client`, `server_facts`, `server_requests`, `server_weights`, `served`)

How weights get there: `transports` through memory that both processes see, `broadcast` otherwise, `receiver` on vLLM's side.

Inside vLLM's workers:

    extension       the methods that are called there
    sampler         burnish's draw in the place of vLLM's sampler (`wide_head`: float32 logits; `scheduler`)
    held            reads back what the model holds; `adapters` those of LoRA
    cpu_linear, cpu_group    what a CPU needs

Nothing here is imported before the engine is chosen, and vLLM itself only when one is made.
"""
