"""Which files of tests run with PyTensor; all others run with Theano only."""

#: The test files that are about PyTensor alone.
OF_PYTENSOR = (
    "test_chains.py", "test_jax.py", "test_modes.py", "test_nutpie.py", "test_pymc.py",
    "test_pymc_gallery.py", "test_pymc_models.py", "test_pytensor.py", "test_resident.py",
    "test_rows_potential.py",
)  # fmt: skip

#: The test files that run with PyTensor.
OF_BOTH = (
    "test_bad_input.py", "test_call.py", "test_checkpoint.py", "test_clipped_gradients.py",
    "test_compiler.py", "test_containers.py", "test_copyable.py", "test_data.py", "test_demos.py",
    "test_drawing.py", "test_engines.py", "test_hardcoded_rows.py", "test_function_oracle.py",
    "test_functions.py", "test_generators.py", "test_graphs_of_steps.py", "test_in_sync.py",
    "test_lifecycle.py", "test_losses.py", "test_machines.py", "test_none.py", "test_ops.py",
    "test_ops_calls.py", "test_ops_gradients.py", "test_ops_shapes.py", "test_outputs.py",
    "test_parallel_function.py", "test_rank_files.py", "test_recorder.py", "test_recurrence.py",
    "test_rehearsal.py", "test_restart.py", "test_rules.py", "test_rules_train.py", "test_session.py",
    "test_spmd.py", "test_stateful.py", "test_timing.py", "test_train.py", "test_train_rules.py",
    "test_uneven.py", "test_updates.py", "test_windows.py", "test_worlds.py",
    *OF_PYTENSOR,
)  # fmt: skip
