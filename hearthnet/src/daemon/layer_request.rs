//! Request to serve layers of a model, and the memory that it may take beside other models.

use std::ops::Range;
use std::sync::Arc;

use hearthnet_engine::footprint;
use hearthnet_files::part::Part;
use hearthnet_shard::{ServeConfig, StartError, check_kv_budget};

use super::weights::Fetcher;
use crate::cli::args::Layers;
use crate::cli::{Failure, failure};
use crate::config::Config;
use crate::hosting::host_config::serve_config;
use crate::hosting::host_engine::start::{kv_hint, start_failure};
use crate::hosting::host_engine::{HostEngine, named_layers_fit, no_such_layers};
use crate::models::OpenModel;
use crate::models::open_file::require_layers;

/// Request to serve layers.
#[derive(Clone)]
pub(crate) struct LayerRequest {
    pub(crate) model: OpenModel,
    pub(crate) layers: Layers,
    pub(crate) threads: Option<usize>,
    pub(crate) engine: HostEngine,
    /// Fetches layers before they are served, if the model is a part.
    pub(crate) fetch: Option<(Fetcher, Arc<Part>)>,
    /// Number of adopted models that share the memory; at least 1.
    pub(crate) models: usize,
}

/// Memory that layers may take, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) weights: u64,
    /// Keys and values.
    pub(super) kv: u64,
    /// Number of models that share the machine's memory equally; 0 and 1 stand for this one alone.
    pub(super) models: usize,
}

/// Part of `all` bytes for one of `models`, of which others may take `used`.
fn share(all: u64, models: usize, used: u64) -> u64 {
    (all / models.max(1) as u64).min(all.saturating_sub(used))
}

impl LayerRequest {
    /// Request for layers of a file on this machine, beside no other model.
    pub(crate) fn of_file(
        model: OpenModel,
        layers: Layers,
        threads: Option<usize>,
        engine: HostEngine,
    ) -> Self {
        Self {
            model,
            layers,
            threads,
            engine,
            fetch: None,
            models: 1,
        }
    }

    /// Checks that the model has the layers, that their weights are here or can be fetched, that they
    /// fit into `memory_budget_mb`, and that `kv_budget_mb` is large enough for a stream.
    pub(crate) fn check(&self, config: &Config) -> Result<(), Failure> {
        let host = &config.research.distributed_inference.host;
        let (weights, kv) = (host.memory_budget_mb.0 << 20, host.kv_budget_mb.0 << 20);
        let models = self.models;
        let all = Memory {
            weights,
            kv,
            models,
        };
        self.fits(all, config)
    }

    /// Memory for the layers beside other ranges, whose weights may take `used` bytes and take `held`
    /// now. Each of several models gets the same part, whatever it needs, so that all nodes divide
    /// alike. Layers that were named get what they need, if the others leave it.
    ///
    /// # Errors
    /// As [`Self::check`], within that memory. Returns an error also if the memory for `--layers
    /// auto` is not known.
    pub(super) fn memory(&self, config: &Config, used: u64, held: u64) -> Result<Memory, Failure> {
        let host = &config.research.distributed_inference.host;
        let kv = share(host.kv_budget_mb.0 << 20, self.models, 0);
        let weights = match self.layers {
            Layers::Range(..) => share(host.memory_budget_mb.0 << 20, 1, used),
            Layers::Auto => {
                let all = self.engine.auto_budget(&self.model.file, config, held)?;
                share(all, self.models, used)
            }
        };
        let mut memory = Memory {
            weights,
            kv,
            models: self.models,
        };
        self.fits(memory, config)?;
        if let Layers::Range(lo, hi) = self.layers {
            memory.weights = self.bytes((lo, hi))?;
        }
        Ok(memory)
    }

    /// Refuses layers whose weights are not on this machine, and are not fetched.
    pub(super) fn check_here(&self, layers: (u32, u32)) -> Result<(), Failure> {
        match self.fetch {
            Some(_) => Ok(()),
            None => require_layers(&self.model.id, &self.model.file, layers),
        }
    }

    /// Bytes of the weights of these layers. Layers that the model lacks count as none.
    pub(super) fn bytes(&self, (lo, hi): (u32, u32)) -> Result<u64, Failure> {
        let all = self.engine.layer_bytes(&self.model.file)?;
        let layers = all.get(lo as usize..=hi as usize).unwrap_or_default();
        Ok(layers.iter().copied().fold(0, u64::saturating_add))
    }

    /// Checks that the model has the layers, that their weights are here or can be fetched, and that
    /// they fit into this memory. Without `memory_budget_mb`, named layers have no limit.
    fn fits(&self, memory: Memory, config: &Config) -> Result<(), Failure> {
        let host = &config.research.distributed_inference.host;
        let total = self.model.file.spec().layers;
        match self.layers {
            Layers::Range(lo, hi) if hi >= total => {
                Err(no_such_layers(&self.model.id, (lo, hi), total))
            }
            Layers::Range(lo, hi) => {
                let layers = lo..hi.saturating_add(1);
                let spec = self.model.file.spec();
                spec.check_range(&layers).map_err(|error| {
                    let Range { start, end } = spec.together();
                    failure!(Config, "layers {lo}-{hi} cannot be served: {error}").hint(format!(
                        "serve all of the layers {start}-{}, or only layers before them",
                        end.saturating_sub(1)
                    ))
                })?;
                self.check_here((lo, hi))?;
                let (model, setting_mb) = (&self.model, host.memory_budget_mb.0);
                named_layers_fit(model, &self.engine, (lo, hi), setting_mb, memory.weights)?;
                self.check_kv(lo..hi.saturating_add(1), memory.kv, config)
            }
            Layers::Auto => self.check_kv_of_any(1, memory.kv, config),
        }
    }

    /// Refuses a KV budget that is too small for a stream in any range of so many layers.
    pub(super) fn check_kv_of_any(
        &self,
        layers: u32,
        kv: u64,
        config: &Config,
    ) -> Result<(), Failure> {
        let mut starts = 0..=self.model.file.spec().layers.saturating_sub(layers);
        starts.try_for_each(|first| self.check_kv(first..first.saturating_add(layers), kv, config))
    }

    /// Refuses a KV budget that is too small for a stream in these layers. An engine with pages of
    /// its own size checks them when it has loaded.
    pub(super) fn check_kv(
        &self,
        layers: Range<u32>,
        kv: u64,
        config: &Config,
    ) -> Result<(), Failure> {
        let HostEngine::Exact(_) = self.engine else {
            return Ok(());
        };
        let footprint = footprint(self.model.file.spec(), layers);
        let config = ServeConfig {
            kv_budget_bytes: kv,
            ..serve_config(config, "")
        };
        check_kv_budget(&config, &footprint).map_err(|error| {
            let failure = start_failure("", &error);
            match error {
                StartError::KvBudget { needed, .. } => failure.hint(kv_hint(needed, self.models)),
                _ => failure,
            }
        })
    }

    /// Largest number of layers of which `kv` bytes hold a stream of a caller.
    pub(super) fn layers_with_kv(&self, kv: u64, config: &Config) -> u32 {
        let mut layers = (1..=self.model.file.spec().layers).rev();
        let most = layers.find(|&layers| self.check_kv_of_any(layers, kv, config).is_ok());
        most.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_share_memory_equally_and_never_take_what_others_may_take() {
        assert_eq!(share(100, 1, 0), 100);
        assert_eq!(share(100, 0, 0), 100);
        assert_eq!(share(100, 3, 0), 33);
        assert_eq!(share(100, 3, 66), 33);
        // Another model may take more than its share: its layers were named.
        assert_eq!(share(100, 3, 80), 20);
        assert_eq!(share(100, 3, 180), 0);
    }
}
