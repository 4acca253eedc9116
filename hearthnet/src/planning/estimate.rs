//! Estimate of a plan for a model of the catalogue of which no node has anything: its sizes come from the
//! catalogue, and its times from those of an adopted model that the nodes have measured. Pure.

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{self, Adoption};
use hearthnet_files::WeightsId;
use hearthnet_hub::catalogue::Shape;
use hearthnet_orchestrator::placement::observed::{have_measured, observed_for};
use hearthnet_orchestrator::placement::plan::{Machine, Model};

use super::report::{Asked, NoPlan, Report};
use super::shape::KV_TOKENS;

/// Parameters of a layer in squares of the width, in models without experts: 4 of attention and 8 of the
/// feed-forward network.
const SQUARES: u64 = 12;

/// Approximate shape of a model whose file has `bytes` bytes. All of them count as layers of one size,
/// and keys and values as a quarter of the width, as in models with grouped queries.
pub(crate) fn approximate(known: &Shape, bytes: u64, (first, last): (u32, u32)) -> Model {
    let layers = known.layers.max(1);
    let squares = known.parameters / (SQUARES * u64::from(layers));
    let width = u32::try_from(squares.isqrt()).unwrap_or(u32::MAX);
    // At least one layer is for hosts.
    let private_first = first.min(layers - 1);
    Model {
        layer_bytes: vec![bytes / u64::from(layers); layers as usize],
        head_bytes: 0,
        row_bytes: width.saturating_mul(2),
        kv_bytes_per_token_per_layer: width,
        kv_tokens: known.context.min(KV_TOKENS),
        uncut: Vec::new(),
        private_first,
        private_last: last.min(layers - 1 - private_first),
    }
}

/// The adopted model from whose times to estimate: of those that the most nodes have measured, the one
/// with the largest layers.
fn measured(state: &log::Community, now_ms: u64) -> Option<&Adoption> {
    let models = state.models().into_iter();
    let known = models.map(|model| {
        let nodes = have_measured(state, WeightsId(model.weights), now_ms).len();
        (nodes, layer_bytes(model), model)
    });
    let best = known.max_by_key(|(nodes, bytes, model)| (*nodes, *bytes, model.weights))?;
    (best.0 > 0).then_some(best.2)
}

fn layer_bytes(model: &Adoption) -> u64 {
    model.file_bytes / u64::from(model.layers.max(1))
}

/// Times of a model whose layers have `bytes` bytes, from those of one whose layers have `of` bytes: a
/// layer takes time in proportion to its bytes, and the head to the width, which is their root.
fn scaled(machine: &Machine, bytes: u64, of: u64) -> Machine {
    // In thousandths, of which the root is 1,000 times too large.
    let times = u128::from(bytes) * 1_000_000 / u128::from(of.max(1));
    let root = times.isqrt();
    let by = |us: u32, times: u128, unit: u128| {
        u32::try_from(u128::from(us) * times / unit).unwrap_or(u32::MAX)
    };
    Machine {
        layer_us: by(machine.layer_us, times, 1_000_000).max(1),
        prefill_row_us: by(machine.prefill_row_us, times, 1_000_000).max(1),
        head_us: by(machine.head_us, root, 1_000),
        holds: None,
        ..machine.clone()
    }
}

impl Report {
    /// Estimates a plan for a model that the community would adopt beside its others.
    ///
    /// # Errors
    /// As [`Self::of`]. [`NoPlan::ModelNotMeasured`] if no adopted model is measured.
    pub(crate) fn estimate(
        state: &log::Community,
        asked: &Asked<'_>,
        now_ms: u64,
        name: &dyn Fn(&NodeId) -> String,
    ) -> Result<Self, NoPlan> {
        let like = measured(state, now_ms).ok_or(NoPlan::ModelNotMeasured)?;
        let weights = WeightsId(like.weights);
        let bytes = asked.shape.layer_bytes.first().copied().unwrap_or_default();
        let models = state.models().len() as u64;
        let community = observed_for(Some(asked.own), state, weights, now_ms);
        let community = community.map(|machine| {
            let scaled = scaled(machine, bytes, layer_bytes(like));
            Some(Machine {
                // Each of the others keeps its share.
                memory_bytes: machine.memory_bytes / (models + 1) * models,
                ..scaled
            })
        });
        let of_model = have_measured(state, weights, now_ms);
        let report = Self::planned(state, asked, &community, &of_model, now_ms, name);
        let mut report = report.map_err(|why| why.among(models + 1))?;
        report.estimated_from = Some(like.name.clone());
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::machine;
    use super::*;

    #[test]
    fn the_shape_of_a_model_is_estimated_from_its_size_and_its_parameters() {
        let known: Shape = serde_json::from_value(serde_json::json!({
            "family": "qwen3", "parameters": 4_022_468_096_u64, "layers": 36, "context": 40_960,
        }))
        .unwrap();
        let model = approximate(&known, 2_497_280_256, (2, 0));
        assert_eq!(model.layers(), 36);
        assert_eq!(model.layer_bytes[0], 2_497_280_256 / 36);
        // It has 2,560.
        assert_eq!(model.row_bytes, 2 * 3_051);
        assert_eq!((model.private_first, model.private_last), (2, 0));
        // Not all layers are private.
        let model = approximate(&known, 36, (99, 99));
        assert_eq!((model.private_first, model.private_last), (35, 0));
    }

    #[test]
    fn layers_with_nine_times_the_bytes_take_nine_times_as_long_and_the_head_three_times() {
        let measured = Machine {
            head_us: 2_000,
            ..machine(1, 4, 100)
        };
        let scaled = scaled(&measured, 900, 100);
        let times = (scaled.layer_us, scaled.prefill_row_us, scaled.head_us);
        assert_eq!(times, (900, 225, 6_000));
    }
}
