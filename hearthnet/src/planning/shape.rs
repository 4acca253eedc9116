//! Shape of a model for the planner.

use std::ops::Range;

use hearthnet_engine::footprint;
use hearthnet_files::ModelFile;
use hearthnet_orchestrator::placement::plan::Model;

/// Most tokens for which each node keeps memory.
pub(super) const KV_TOKENS: u32 = 4096;

/// Properties of a model for the planner. `hosted` are the layers that callers do not run
/// themselves.
pub(crate) fn shape(file: &ModelFile, hosted: Range<u32>) -> Model {
    let spec = file.spec();
    let row = u64::from(spec.width).saturating_mul(spec.boundary.bytes_per_value() as u64);
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let kv_tokens = spec.context.min(KV_TOKENS);
    // Layers may differ; states of a fixed size count as those of all tokens.
    let of_layer = |layer| footprint(spec, layer..layer + 1).bytes(kv_tokens);
    let kv_bytes = (0..spec.layers).map(of_layer).max().unwrap_or(0);
    Model {
        layer_bytes: (0..spec.layers)
            .map(|layer| file.layer_bytes(layer))
            .collect(),
        head_bytes: file.head_bytes(),
        row_bytes: small(row),
        kv_bytes_per_token_per_layer: small(kv_bytes.div_ceil(kv_tokens.max(1).into())),
        kv_tokens,
        uncut: (1..spec.layers)
            .filter(|&layer| spec.check_cut(layer).is_err())
            .collect(),
        private_first: hosted.start,
        private_last: spec.layers.saturating_sub(hosted.end),
    }
}
