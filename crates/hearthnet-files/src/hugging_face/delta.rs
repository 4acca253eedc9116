//! Tensors of gated delta rules, whose rows the converter brings into another order.
//!
//! A directory has the value heads of each key head side by side. llama.cpp's converter deals them
//! out for the classes of Qwen3.5: first the first value head of each key head, then the second
//! ([`DeltaSpec::tiled`]). Qwen3-Next keeps their order, but has queries, keys, values and gates of
//! each key head side by side in one matrix.

use std::ops::Range;

use super::shards::Stored;
use crate::gguf::TensorType;
use crate::spec::DeltaSpec;

/// Suffix of the matrix of queries, keys, values and gates together.
const FUSED: &str = "in_proj_qkvz.weight";

/// Value heads of the directory, in the order of the model file.
pub(super) fn heads(spec: &DeltaSpec) -> impl Iterator<Item = u64> + use<> {
    let (spec, each) = (*spec, spec.value_heads / spec.key_heads.max(1));
    (0..spec.value_heads).map(move |head| {
        u64::from(match spec.tiled {
            true => spec.key_head(head) * each + head / spec.key_heads.max(1),
            false => head,
        })
    })
}

/// Rows of the directory's tensor `name` that hold tensor `rule` of a block of the model file, and
/// the number of all of its rows. `None` if they are the same rows.
pub(super) fn rows(spec: &DeltaSpec, rule: &str, name: &str) -> Option<(Vec<Range<u64>>, u64)> {
    let (keys, width) = (u64::from(spec.keys()), u64::from(spec.value_width));
    let heads = |first: u64, width: u64| {
        heads(spec).map(move |head| first + head * width..first + (head + 1) * width)
    };
    let all: Vec<Range<u64>> = match rule {
        "attn_qkv.weight" | "attn_gate.weight" if name.ends_with(FUSED) => {
            let key = u64::from(spec.key_width);
            let value = u64::from(spec.values() / spec.key_heads.max(1));
            let each = 2 * (key + value);
            let groups = |from: u64, len: u64| {
                let firsts = (0..u64::from(spec.key_heads)).map(move |head| head * each + from);
                firsts.map(move |first| first..first + len)
            };
            let rows = match rule {
                "attn_gate.weight" => groups(2 * key + value, value).collect(),
                _ => (groups(0, key).chain(groups(key, key)))
                    .chain(groups(2 * key, value))
                    .collect(),
            };
            return Some((rows, each * u64::from(spec.key_heads)));
        }
        "attn_qkv.weight" | "ssm_conv1d.weight" => std::iter::once(0..2 * keys)
            .chain(heads(2 * keys, width))
            .collect(),
        "attn_gate.weight" => heads(0, width).collect(),
        "ssm_beta.weight" | "ssm_alpha.weight" | "ssm_dt.bias" | "ssm_a" => heads(0, 1).collect(),
        _ => return None,
    };
    let count = all.iter().map(|rows| rows.end).max().unwrap_or(0);
    let in_order = all.windows(2).all(|pair| pair[0].end == pair[1].start);
    (!in_order).then_some((all, count))
}

/// Rows of a tensor whose rows have `values` values each.
pub(super) fn part(stored: &Stored, dtype: TensorType, values: u64, rows: &Range<u64>) -> Stored {
    let row = values * u64::from(dtype.block_bytes());
    stored.part(rows.start * row, vec![rows.end - rows.start, values])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(tiled: bool) -> DeltaSpec {
        DeltaSpec {
            attention_every: 4,
            convolution: 4,
            key_heads: 2,
            value_heads: 6,
            key_width: 8,
            value_width: 4,
            tiled,
            norm_eps: 1e-6,
        }
    }

    #[test]
    fn value_heads_are_dealt_out_over_key_heads() {
        let order: Vec<u64> = heads(&spec(true)).collect();
        assert_eq!(order, [0, 3, 1, 4, 2, 5]);
        assert_eq!(heads(&spec(false)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        let rows = |rule| rows(&spec(true), rule, "in_proj.weight").unwrap();
        assert_eq!(rows("ssm_a").0, [0..1, 3..4, 1..2, 4..5, 2..3, 5..6]);
        assert_eq!(rows("attn_qkv.weight").0[..3], [0..32, 32..36, 44..48]);
        assert_eq!(rows("attn_qkv.weight").1, 56);
    }

    #[test]
    fn the_parts_of_a_fused_matrix_are_found_in_each_key_head() {
        let rows = |rule| rows(&spec(false), rule, "linear_attn.in_proj_qkvz.weight").unwrap();
        let expected = [0..8, 40..48, 8..16, 48..56, 16..28, 56..68];
        assert_eq!(rows("attn_qkv.weight"), (expected.to_vec(), 80));
        assert_eq!(rows("attn_gate.weight"), (vec![28..40, 68..80], 80));
    }
}
