//! Hyperparameters that differ between the blocks of a model.

use super::keys::{KEY_HEADS, Keys, SHARED_KEYS, SHORT_CONVOLUTION, WINDOWS};
use crate::error::ModelError;
use crate::schema::Lookup as _;
use crate::spec::{ConvolutionSpec, SharedKeysSpec, WindowHeads};

/// Blocks that have a window, in families whose files state them.
pub(super) struct Windows {
    /// Every n-th block is global; `None` if the file does not state it.
    pub(super) global_every: Option<u32>,
}

impl Windows {
    pub(super) fn read(keys: &Keys<'_>, layers: u32) -> Result<Self, ModelError> {
        if !keys.family.reads_key(WINDOWS) {
            return Ok(Self { global_every: None });
        }
        let windows = keys.per_block(WINDOWS, layers)?;
        if windows.is_empty() {
            return Err(keys.missing(WINDOWS));
        }
        let first = (1..).zip(&windows).find(|(_, window)| **window == 0);
        let every: u32 = first.map_or(layers.saturating_add(1), |(block, _)| block);
        let regular = (1..)
            .zip(&windows)
            .all(|(block, window): (u32, _)| (*window == 0) == block.is_multiple_of(every));
        match first.is_some() && regular && windows.len() == layers as usize {
            true => Ok(Self {
                global_every: Some(every),
            }),
            false => Err(keys.bad(WINDOWS, "must have a global block after each n - 1 others")),
        }
    }

    /// Key heads of blocks with a window, or of the others.
    pub(super) fn kv_heads(
        &self,
        keys: &Keys<'_>,
        layers: u32,
        windowed: bool,
    ) -> Result<Option<u32>, ModelError> {
        let key = KEY_HEADS;
        let Some(every) = self.global_every else {
            return keys.integer(key);
        };
        let all = keys.per_block(key, layers)?;
        if all.len() < 2 {
            return Ok(all.first().copied());
        }
        let of_kind = (1..)
            .zip(&all)
            .filter(|(block, _): &(u32, _)| block.is_multiple_of(every) != windowed);
        let mut heads = of_kind.map(|(_, heads)| *heads);
        let first = heads.next();
        match heads.all(|heads| Some(heads) == first) {
            true => Ok(first),
            false => Err(keys.bad(
                key,
                "must be equal in all blocks with a window, and in all others",
            )),
        }
    }

    pub(super) fn heads(
        &self,
        keys: &Keys<'_>,
        layers: u32,
    ) -> Result<Option<WindowHeads>, ModelError> {
        let Some(head_dim) = keys.integer("attention.key_length_swa")? else {
            return Ok(None);
        };
        let values = keys.integer("attention.value_length_swa")?;
        if values.is_some_and(|values| values != head_dim) {
            let reason = "must equal attention.key_length_swa";
            return Err(keys.bad("attention.value_length_swa", reason));
        }
        let kv_heads = match self.kv_heads(keys, layers, true)? {
            Some(kv_heads) => kv_heads,
            None => keys.required_integer("attention.head_count")?,
        };
        let dims = keys.integer("rope.dimension_count_swa")?;
        Ok(Some(WindowHeads {
            kv_heads,
            head_dim,
            rope_dims: dims.unwrap_or(head_dim),
        }))
    }
}

/// Key heads of the blocks with attention, and the gated short convolution of the blocks that have
/// no key heads.
pub(super) fn convolution(
    keys: &Keys<'_>,
    layers: u32,
) -> Result<(Option<u32>, Option<ConvolutionSpec>), ModelError> {
    let all = keys.per_block(KEY_HEADS, layers)?;
    let heads = common(keys, KEY_HEADS, &all)?;
    let attends = (0u32..).zip(&all).filter(|(_, heads)| **heads > 0);
    let attention: Vec<u32> = attends.map(|(layer, _)| layer).collect();
    let positions = keys.required_integer(SHORT_CONVOLUTION)?;
    let some = attention.len() < all.len();
    let convolution = some.then_some(ConvolutionSpec {
        positions,
        attention,
    });
    Ok((heads, convolution))
}

/// Mixers of the blocks, in families whose files state them by the key heads and the width of the
/// feed-forward layer of each block.
pub(super) struct Mixers {
    /// [`ModelSpec::mixers`](crate::spec::ModelSpec::mixers)
    pub(super) letters: String,
    /// Key heads of the blocks with attention.
    pub(super) kv_heads: Option<u32>,
    pub(super) ffn: u32,
}

impl Mixers {
    /// `None` for families whose files do not state them.
    pub(super) fn read(keys: &Keys<'_>, layers: u32) -> Result<Option<Self>, ModelError> {
        let Some(family) = keys.family.mamba else {
            return Ok(None);
        };
        let (of_heads, of_feed) = (KEY_HEADS, "feed_forward_length");
        let listed = |key| {
            let numbers = keys.per_block(key, layers)?;
            match numbers.len() == layers as usize {
                true => Ok(numbers),
                false => Err(keys.bad(key, "must have a number for each block")),
            }
        };
        let heads = listed(of_heads)?;
        let (widths, ffn) = match family.single {
            true => (listed(of_feed)?, None),
            false => (vec![0; heads.len()], Some(ffn(keys, layers)?)),
        };
        let mut letters = String::new();
        for (heads, width) in heads.iter().zip(&widths) {
            letters.push(match (*heads, *width) {
                (0, 0) => 'M',
                (_, 0) => '*',
                (0, _) => '-',
                _ => return Err(keys.bad(of_feed, "must be 0 in blocks with attention")),
            });
        }
        let ffn = match ffn {
            Some(ffn) => ffn,
            None => common(keys, of_feed, &widths)?
                .ok_or_else(|| keys.bad(of_feed, "must be above 0 in some blocks"))?,
        };
        Ok(Some(Self {
            letters,
            kv_heads: common(keys, of_heads, &heads)?,
            ffn,
        }))
    }
}

/// The number that all blocks have in which it is not 0.
fn common(keys: &Keys<'_>, key: &str, numbers: &[u32]) -> Result<Option<u32>, ModelError> {
    let mut some = numbers.iter().copied().filter(|number| *number > 0);
    let first = some.next();
    match some.all(|number| Some(number) == first) {
        true => Ok(first),
        false => Err(keys.bad(key, "must be equal in all blocks where it is not 0")),
    }
}

/// Width of the feed-forward layer of the blocks with keys of their own.
pub(super) fn ffn(keys: &Keys<'_>, layers: u32) -> Result<u32, ModelError> {
    let all = keys.per_block("feed_forward_length", layers)?;
    match all.first() {
        Some(ffn) => Ok(*ffn),
        None => Err(keys.missing("feed_forward_length")),
    }
}

/// Blocks at the end that use keys and values of an earlier block, and the width of their
/// feed-forward layers.
pub(super) fn shared_keys(
    keys: &Keys<'_>,
    layers: u32,
) -> Result<Option<SharedKeysSpec>, ModelError> {
    let key = "feed_forward_length";
    let all = keys.per_block(key, layers)?;
    let blocks = keys.integer(SHARED_KEYS)?.unwrap_or(0);
    let own = layers.saturating_sub(blocks).max(1) as usize;
    let (own, sharing) = all.split_at(own.min(all.len()));
    let equal = |widths: &[u32]| widths.windows(2).all(|pair| pair[0] == pair[1]);
    if !equal(own) || !equal(sharing) {
        let reason = "must be equal in all blocks, except those that share keys of other blocks";
        return Err(keys.bad(key, reason));
    }
    let ffn = sharing.first().filter(|ffn| own.first() != Some(ffn));
    Ok((blocks > 0).then_some(SharedKeysSpec {
        blocks,
        ffn: ffn.copied(),
    }))
}
