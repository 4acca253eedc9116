//! The capabilities of this node and their handlers.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use hearthnet_transport::{Caps, Code, Full, Place};
use parking_lot::Mutex;
use serde_json::Value;

use super::descriptor::CapabilityDescriptor;
use super::error::CallError;
use super::frame_sink::FrameSink;
use super::{Cancel, MAX_CAPABILITIES};
use crate::{Capability, NodeId};

/// Future of a call's answer, returned by [`Handler::call`].
pub type Answering<'a> = BoxFuture<'a, Result<Value, CallError>>;

/// Answers calls of one capability.
pub trait Handler: Send + Sync {
    /// Answers one call: sends events to `out` and returns the result.
    ///
    /// Runs only after the checks of the caller's level, the parameters and all limits. When the
    /// caller cancels or is lost, [`CallContext::cancel`] fires and the future is dropped. Work on
    /// other threads must watch that token, and keep [`CallContext::slot`] until it stops.
    fn call(&self, ctx: CallContext, params: Value, out: FrameSink) -> Answering<'_>;

    /// Checks a stranger's proof of an invite and returns the key of the invite, whose budget pays
    /// for the call. Runs before the call takes a slot, so it must be cheap: one signature and one
    /// look-up in the log. `None` if no proof is needed, or the invite is no longer open.
    ///
    /// # Errors
    /// The refusal of a stranger without a valid proof.
    fn authorize_stranger(
        &self,
        _caller: &NodeId,
        _params: &Value,
    ) -> Result<Option<NodeId>, CallError> {
        Ok(None)
    }
}

/// Caller of a call, and its cancellation token.
#[derive(Debug, Clone)]
pub struct CallContext {
    /// The calling node; this node itself for an app on this machine.
    pub caller: NodeId,
    /// Quota key of the caller: itself, or the member that answers for it.
    pub quota_key: NodeId,
    /// True for an app on this machine, through the local API.
    pub is_local: bool,
    /// Name and version that the caller asked for.
    pub capability: Capability,
    /// Fires when the caller cancels or disconnects, or the time limit has passed.
    pub cancel: Cancel,
    /// The call's slot among the concurrent calls; freed when the last clone is dropped.
    pub slot: Slot,
}

impl CallContext {
    /// Refuses callers on other machines. `may` completes the message, as in "may ask this".
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

/// Permit for one concurrent call.
#[derive(Debug, Clone)]
pub struct Slot(#[expect(dead_code, reason = "held for its Drop")] Arc<Place<NodeId>>);

/// A registered capability.
#[derive(Clone)]
pub(crate) struct Local {
    pub(crate) descriptor: Arc<CapabilityDescriptor>,
    pub(crate) handler: Arc<dyn Handler>,
    /// Slots of peers, and of programs on this machine, which peers thus cannot use up.
    slots: [Arc<Caps<NodeId>>; 2],
}

impl Local {
    /// Takes a slot for one more call.
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

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The name and major version are registered already.
    #[error("{0} is registered already")]
    Taken(Capability),
    /// The node has `MAX_CAPABILITIES` capabilities already.
    #[error("a node has at most {MAX_CAPABILITIES} capabilities")]
    Full,
    /// A limit is zero, so no call could run.
    #[error("every limit of {0} must be at least 1")]
    Limits(Capability),
}

/// Name and major version: unique in the registry.
type Key = (String, u16);

#[derive(Default)]
pub struct Registry {
    local: Mutex<BTreeMap<Key, Local>>,
}

impl Registry {
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

    pub fn descriptors(&self) -> Vec<CapabilityDescriptor> {
        self.local
            .lock()
            .values()
            .map(|l| (*l.descriptor).clone())
            .collect()
    }

    /// The capability that satisfies `asked`: the same name and major version, and at least its
    /// minor version.
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
    use crate::community::log::Level;
    use crate::testing::id as node;

    struct Nothing;

    impl Handler for Nothing {
        fn call(&self, _: CallContext, _: Value, _: FrameSink) -> Answering<'_> {
            Box::pin(async { Ok(Value::Null) })
        }
    }

    fn cap(text: &str) -> Capability {
        text.parse().unwrap()
    }

    fn descriptor(text: &str) -> CapabilityDescriptor {
        CapabilityDescriptor::new(cap(text), "A test.", Some(Level::Member))
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
        let none = "not_found: this node has no capability a.c";
        assert_eq!(find("a.c@1.0"), none);
    }

    #[test]
    fn one_name_and_major_version_is_there_once() {
        let registry = with(&["a.b@1.2"]);
        let register = |text| registry.register(descriptor(text), Arc::new(Nothing));
        let taken = RegisterError::Taken(cap("a.b@1.3"));
        assert_eq!(register("a.b@1.3"), Err(taken));
        register("a.b@2.0").unwrap();
    }

    #[test]
    fn a_capability_with_a_zero_limit_is_refused() {
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
        // A clone keeps the slot: a thread may still be at work.
        drop(first);
        assert_eq!(code(local.slot(node(3), false)), Code::BUSY);
        drop(copy);
        drop(third);
        local.slot(node(1), false).unwrap();
    }
}
