//! Commands of the program, each in a file or folder of its name.

pub(crate) mod adversarial;
pub(crate) mod audit;
pub(crate) mod backup;
pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod community;
pub(crate) mod config;
pub(crate) mod conformance;
pub(crate) mod demo;
pub(crate) mod diagnose;
pub(crate) mod embed;
pub(crate) mod engine;
mod handover;
pub(crate) mod http_key;
pub(crate) mod id;
pub(crate) mod init;
pub(crate) mod log;
pub(crate) mod manual;
pub(crate) mod model;
pub(crate) mod page;
pub(crate) mod pause;
pub(crate) mod plan;
pub(crate) mod restore;
pub(crate) mod serve;
pub(crate) mod shard;
pub(crate) mod status;
pub(crate) mod up;
