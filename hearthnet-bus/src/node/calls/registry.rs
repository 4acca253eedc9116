//! What this node can be asked to do.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use hearthnet_transport::{Caps, Code, Full, Place};
use parking_lot::Mutex;
use serde_json::Value;

use super::descriptor::{CapabilityDescriptor, Trust};
use super::error::CallError;
use super::frame_sink::FrameSink;
use super::{Cancel, MAX_CAPABILITIES};
use crate::{Capability, NodeId};

/// A call that is being answered: what [`Handler::call`] returns.
pub type Answering<'a> = BoxFuture<'a, Result<Value, CallError>>;

/// Answers calls of one capability.
pub trait Handler: Send + Sync {
    /// Answers one call: events go to `out` as they come, the result is returned.
    ///
    /// Runs only after the caller's level, the parameters and all limits were checked.
    /// When the caller cancels or is lost, [`CallContext::cancel`] fires and the future
    /// is dropped; work on other threads has to watch the former and to keep
    /// [`CallContext::slot`] for as long as it goes on.
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_>;

    /// Who vouches for a stranger that calls with these parameters: the key of the invite that it
    /// proves to have. Asked before the call takes a place, so it must be cheap: a signature, a look
    /// at the log. `None` if strangers need nobody for it, or nobody vouches any more.
    ///
    /// # Errors
    /// The refusal of one that claims a proof and has none.
    fn vouches(&self, _caller: &NodeId, _params: &Value) -> Result<Option<NodeId>, CallError> {
        Ok(None)
    }
}

/// Who calls, and how to notice that it gave up.
#[derive(Debug, Clone)]
pub struct CallContext {
    /// The node that calls; this node itself for an app on this machine.
    pub caller: NodeId,
    /// Whom it counts with: whatever is shared fairly is shared among these.
    pub answers: NodeId,
    /// How far it is trusted.
    pub trust: Trust,
    /// Whether an app on this machine calls, through the local API.
    pub is_local: bool,
    /// The version that was asked for.
    pub capability: Capability,
    /// Fires when the caller gives up, disconnects, or the time is over.
    pub cancel: Cancel,
    /// The call's place among those that may run at once; free when the last clone is dropped.
    pub slot: Slot,
}

impl CallContext {
    /// Refuses whoever is not on this machine: only programs there `may`, say, "may ask this".
    ///
    /// # Errors
    /// [`Code::UNAUTHORIZED`] for another node.
    pub fn require_local(&self, may: &str) -> Result<(), CallError> {
        match self.is_local {
            true => Ok(()),
            false => Err(CallError::new(
                Code::UNAUTHORIZED,
                format!("only programs on the node's own machine {may}"),
            )),
        }
    }
}

/// A place among the calls that may run at once.
#[derive(Debug, Clone)]
pub struct Slot(#[expect(dead_code, reason = "held for its Drop")] Arc<Place<NodeId>>);

/// A capability of this node, found.
#[derive(Clone)]
pub(crate) struct Local {
    pub(crate) descriptor: Arc<CapabilityDescriptor>,
    pub(crate) handler: Arc<dyn Handler>,
    /// Of peers, and of programs on this machine: what is others' takes nothing from its owner.
    slots: [Arc<Caps<NodeId>>; 2],
}

impl Local {
    /// A place for one more call.
    pub(crate) fn slot(&self, caller: NodeId, is_local: bool) -> Result<Slot, CallError> {
        let [peers, here] = &self.slots;
        let slots = if is_local { here } else { peers };
        let full = match slots.enter(caller) {
            Ok(place) => return Ok(Slot(Arc::new(place))),
            Err(full) => full,
        };
        let limits = self.descriptor.limits;
        let whose = match full {
            Full::InAll => format!("{} calls", limits.concurrent),
            Full::ForKey => format!("{} calls of yours", limits.concurrent_per_caller),
        };
        let capability = &self.descriptor.capability;
        let message = format!("{whose} to {capability} are running here already");
        Err(CallError::new(Code::BUSY, message)
            .with_hint("wait until one has ended, or ask another node"))
    }
}

/// Why a capability could not be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// One with this name and major version is there already.
    #[error("{0} is registered already")]
    Taken(Capability),
    /// There are as many as a node may have.
    #[error("a node has at most {MAX_CAPABILITIES} capabilities")]
    Full,
    /// A limit is zero, so nobody could ever call it.
    #[error("every limit of {0} must be at least 1")]
    Limits(Capability),
}

/// Name and major version: what there can be one of.
type Key = (String, u16);

/// The capabilities of this node.
#[derive(Default)]
pub struct Registry {
    local: Mutex<BTreeMap<Key, Local>>,
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a capability of this node.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(
        &self,
        descriptor: CapabilityDescriptor,
        handler: Arc<dyn Handler>,
    ) -> Result<(), RegisterError> {
        let capability = descriptor.capability.clone();
        let limits = descriptor.limits;
        if limits.concurrent == 0 || limits.concurrent_per_caller == 0 || limits.seconds == 0 {
            return Err(RegisterError::Limits(capability));
        }
        let mut all = self.local.lock();
        let key = (capability.name().to_owned(), capability.major());
        if all.contains_key(&key) {
            return Err(RegisterError::Taken(capability));
        }
        if all.len() >= MAX_CAPABILITIES {
            return Err(RegisterError::Full);
        }
        let (most, each) = (limits.concurrent, limits.concurrent_per_caller);
        let local = Local {
            descriptor: Arc::new(descriptor),
            handler,
            slots: [(); 2].map(|()| Caps::new(most as usize, each as usize)),
        };
        all.insert(key, local);
        Ok(())
    }

    /// What this node can be asked to do.
    pub fn descriptors(&self) -> Vec<CapabilityDescriptor> {
        self.local
            .lock()
            .values()
            .map(|l| (*l.descriptor).clone())
            .collect()
    }

    /// The capability of this node that answers to `asked`: the same name and major
    /// version, at least the minor one.
    pub(crate) fn find(&self, asked: &Capability) -> Result<Local, CallError> {
        let all = self.local.lock();
        let key = (asked.name().to_owned(), asked.major());
        if let Some(local) = all.get(&key)
            && local.descriptor.capability.satisfies(asked)
        {
            return Ok(local.clone());
        }
        let versions: Vec<String> = all
            .values()
            .map(|l| &l.descriptor.capability)
            .filter(|c| c.name() == asked.name())
            .map(|c| format!("{}.{}", c.major(), c.minor()))
            .collect();
        Err(if versions.is_empty() {
            CallError::new(
                Code::NOT_FOUND,
                format!("this node has no capability {}", asked.name()),
            )
            .with_hint("bus.describe@1.0 lists what it has")
        } else {
            CallError::new(
                Code::VERSION_UNSUPPORTED,
                format!(
                    "this node has {} in version {}",
                    asked.name(),
                    versions.join(", ")
                ),
            )
            .with_hint("ask for the same major version and at most this minor version")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeKey;

    struct Nothing;

    impl Handler for Nothing {
        fn call(&self, _: CallContext, _: Value, _: FrameSink) -> Answering<'_> {
            Box::pin(async { Ok(Value::Null) })
        }
    }

    fn node(seed: u8) -> NodeId {
        NodeKey::from_secret(&[seed; 32]).id()
    }

    fn cap(text: &str) -> Capability {
        text.parse().unwrap()
    }

    fn descriptor(text: &str) -> CapabilityDescriptor {
        CapabilityDescriptor::new(cap(text), "A test.", Trust::Member)
    }

    fn with(texts: &[&str]) -> Registry {
        let registry = Registry::new();
        for text in texts {
            registry
                .register(descriptor(text), Arc::new(Nothing))
                .unwrap();
        }
        registry
    }

    #[test]
    fn the_version_rule_decides_what_is_found() {
        let registry = with(&["a.b@1.2", "a.b@3.0"]);
        let find = |text| match registry.find(&cap(text)) {
            Ok(local) => local.descriptor.capability.to_string(),
            Err(error) => format!("{}: {}", error.code(), error),
        };
        assert_eq!(find("a.b@1.0"), "a.b@1.2");
        assert_eq!(find("a.b@1.2"), "a.b@1.2");
        assert_eq!(find("a.b@3.0"), "a.b@3.0");
        let other = "version_unsupported: this node has a.b in version 1.2, 3.0";
        assert_eq!(find("a.b@1.3"), other);
        assert_eq!(find("a.b@2.0"), other);
        assert_eq!(
            find("a.c@1.0"),
            "not_found: this node has no capability a.c"
        );
    }

    #[test]
    fn one_name_and_major_version_is_there_once() {
        let registry = with(&["a.b@1.2"]);
        assert_eq!(
            registry.register(descriptor("a.b@1.3"), Arc::new(Nothing)),
            Err(RegisterError::Taken(cap("a.b@1.3")))
        );
        registry
            .register(descriptor("a.b@2.0"), Arc::new(Nothing))
            .unwrap();
    }

    #[test]
    fn a_capability_that_nobody_could_call_is_refused() {
        let mut zero = descriptor("a@1.0");
        zero.limits.concurrent_per_caller = 0;
        let refused = Registry::new().register(zero, Arc::new(Nothing));
        assert_eq!(refused, Err(RegisterError::Limits(cap("a@1.0"))));
    }

    #[test]
    fn slots_are_limited_per_caller_and_in_all_and_come_back() {
        let registry = Registry::new();
        let mut tight = descriptor("a@1.0");
        tight.limits.concurrent = 3;
        tight.limits.concurrent_per_caller = 2;
        registry.register(tight, Arc::new(Nothing)).unwrap();
        let local = registry.find(&cap("a@1.0")).unwrap();
        let code = |slot: Result<Slot, CallError>| slot.unwrap_err().code().clone();
        let first = local.slot(node(1), false).unwrap();
        let copy = first.clone();
        let _second = local.slot(node(1), false).unwrap();
        assert_eq!(code(local.slot(node(1), false)), Code::BUSY);
        let third = local.slot(node(2), false).unwrap();
        assert_eq!(code(local.slot(node(3), false)), Code::BUSY);
        // A clone keeps the place: a thread may still be at work.
        drop(first);
        assert_eq!(code(local.slot(node(3), false)), Code::BUSY);
        drop(copy);
        drop(third);
        local.slot(node(1), false).unwrap();
    }
}
