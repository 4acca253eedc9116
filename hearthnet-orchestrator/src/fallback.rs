//! From hosts to this machine in the middle of an answer.
//!
//! The rows that were handed to the hosts are kept (the embeddings: boundary 0).
//! The whole model here runs them once, and the answer goes on with the next
//! token: what was said stays said, since the arithmetic is the same.

use std::time::Instant;

use crate::backend::{Backend, HopTimes, Notice, RouteHop, Run};
use crate::error::{Blame, ChatError};
use crate::sharded::ShardedBackend;

/// Makes the backend that holds the whole model. It may take seconds.
pub type LoadLocal = Box<dyn FnOnce() -> Result<Box<dyn Backend>, ChatError> + Send>;

/// Hosts first; this machine when they cannot go on.
pub struct WithFallback {
    hosts: ShardedBackend,
    load: Option<LoadLocal>,
    local: Option<Box<dyn Backend>>,
}

impl WithFallback {
    /// `load` is called at most once, when the hosts have failed for good.
    pub fn new(hosts: ShardedBackend, load: LoadLocal) -> Self {
        Self {
            hosts,
            load: Some(load),
            local: None,
        }
    }

    fn active(&self) -> &dyn Backend {
        match &self.local {
            Some(local) => local.as_ref(),
            None => &self.hosts,
        }
    }
}

impl Backend for WithFallback {
    fn run(
        &mut self,
        position: u32,
        rows: &[f32],
        out: &mut Vec<f32>,
        run: &mut Run<'_>,
    ) -> Result<(), ChatError> {
        if let Some(local) = &mut self.local {
            return local.run(position, rows, out, run);
        }
        let error = match self.hosts.run(position, rows, out, run) {
            Err(error) if error.blame() == Blame::Peer => error,
            result => return result,
        };
        let since = Instant::now();
        let Some(load) = self.load.take() else {
            return Err(error);
        };
        tracing::warn!(
            code = error.code(),
            "going on without hosts, on this machine: {error}"
        );
        metrics::counter!("distributed_inference_fallback_to_local_total").increment(1);
        let mut local = load()?;
        let held = self.hosts.submitted()?;
        local.run(0, &held, out, run)?;
        for all in local.route() {
            (run.notify)(Notice::Failover {
                shard_id: all.shard_id,
                host: None,
                code: error.code().to_owned(),
                replacements: Vec::new(),
                replayed: position,
                recovery_ms: since.elapsed().as_secs_f64() * 1e3,
            });
        }
        self.local = Some(local);
        Ok(())
    }

    fn route(&self) -> Vec<RouteHop> {
        self.active().route()
    }

    fn times(&self) -> Vec<HopTimes> {
        self.active().times()
    }

    fn begin_call(&mut self) {
        match &mut self.local {
            Some(local) => local.begin_call(),
            None => self.hosts.begin_call(),
        }
    }

    fn is_alive(&self) -> bool {
        self.active().is_alive()
    }

    fn close(&mut self) {
        match &mut self.local {
            Some(local) => local.close(),
            None => self.hosts.close(),
        }
    }
}
