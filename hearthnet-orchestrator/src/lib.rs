//! Covers a model's layers with shards, drives the pipeline, samples, and checks what comes back.
