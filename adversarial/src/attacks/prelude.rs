//! Items that several attacks use. A definition or import in an attack takes precedence.

pub(super) use hearthnet_bus::calls::Client;
pub(super) use hearthnet_bus::invite::Invite;
pub(super) use hearthnet_bus::log::{Body, EventLog, Level};
pub(super) use hearthnet_bus::testing::{ROOT, key};
pub(super) use hearthnet_bus::{Capability, Descriptor, NodeId, NodeKey};
pub(super) use hearthnet_orchestrator::link::HostLink;
pub(super) use hearthnet_testkit::{Tamper, TinyLlama};
pub(super) use hearthnet_transport::{CloseCode, Config};
pub(super) use tokio::net::TcpStream;
pub(super) use tokio::runtime::Handle;

pub(super) use crate::bench::new_key;
pub(super) use crate::fleet::{AUDIT_TIMEOUT, Fleet, PROMPT, TOKENS, blocking, unchanged};
pub(super) use crate::honest::Call;
pub(super) use crate::raw::event::*;
pub(super) use crate::raw::*;
pub(super) use crate::test_community::{appended, level_change};
pub(super) use crate::victim::{Gauges, KEY_FILE, MODEL_ID, Model, until};
pub(super) use crate::{Bench, Findings, HarnessError, Result};
