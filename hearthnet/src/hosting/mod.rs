//! Hosts of layers: engine, configuration, and processes.

pub(crate) mod cards;
pub(crate) mod engine_process;
pub(crate) mod host_config;
pub(crate) mod host_engine;
pub(crate) mod host_process;
pub(crate) mod layer_times;
