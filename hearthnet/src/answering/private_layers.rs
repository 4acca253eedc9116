//! Private layers: layers that this machine computes itself for its chats over hosts.

use std::ops::Range;

use hearthnet_engine::EngineOptions;
use hearthnet_orchestrator::placement::missing;
use hearthnet_orchestrator::private_layers::PrivateLayers;

use crate::answering::chat_backends::kv_bytes;
use crate::cli::args::PrivateArgs;
use crate::cli::{Failure, failure, note};
use crate::config::Config;
use crate::models::{OpenModel, load_failure, share_of_free};

/// Numbers of first and last layers.
type Ends = (u32, u32);

/// Numbers of private layers that are asked for, and that memory allows.
fn chosen(model: &OpenModel, args: PrivateArgs, config: &Config) -> Result<(Ends, Ends), Failure> {
    let inference = &config.research.distributed_inference;
    let (first, last) = (args.private_first, args.private_last);
    let asked = (
        first.unwrap_or(inference.private_first_layers.0),
        last.unwrap_or(inference.private_last_layers.0),
    );
    let total = model.file.spec().layers;
    // An explicit number for this run must be possible.
    if first.unwrap_or(0).saturating_add(last.unwrap_or(0)) >= total {
        return Err(failure!(
            Config,
            "--private-first and --private-last leave none of the {total} layers for hosts"
        )
        .hint("--local answers on this machine alone"));
    }
    let bytes: Vec<u64> = (0..total)
        .map(|layer| model.file.layer_bytes(layer))
        .collect();
    let (mut fitting, spec) = (fit(asked, &bytes, share_of_free(50)), model.file.spec());
    // Hosts have the layers that one machine must run, or this one has all of them.
    if let Err(error) = spec.check_cut(total - fitting.1) {
        if last.is_some() {
            return Err(failure!(Config, "--private-last {}: {error}", fitting.1)
                .hint("leave out --private-last, so that hosts run the last layers"));
        }
        fitting.1 = 0;
    }
    if fitting.1 > 0 && spec.per_layer.is_some() {
        if last.is_some() {
            return Err(failure!(
                Config,
                "--private-last {}: a model with per-layer embeddings can have no private last layers",
                fitting.1
            )
            .hint("leave out --private-last; hosts of this model can tell the tokens in any case"));
        }
        fitting.1 = 0;
    }
    fitting.0 = fitting.0.min(spec.together().start);
    Ok((asked, fitting))
}

/// Ranges of the private layers, first and last layer inclusive.
pub(crate) fn wanted(
    model: &OpenModel,
    args: PrivateArgs,
    config: &Config,
) -> Result<Vec<(u32, u32)>, Failure> {
    let hosted = hosted(model, args, config)?;
    let total = model.file.spec().layers;
    Ok(missing(total, &[(hosted.start, hosted.end - 1)]))
}

/// Layers that hosts run, half-open and never empty, with the private layers that [`load`] would
/// load.
pub(crate) fn hosted(
    model: &OpenModel,
    args: PrivateArgs,
    config: &Config,
) -> Result<Range<u32>, Failure> {
    let (_, (first, last)) = chosen(model, args, config)?;
    Ok(first..model.file.spec().layers - last)
}

/// Loads the private layers of a model for at most `chats` conversations: as many layers as
/// requested, as far as memory allows.
pub(crate) fn load(
    model: &mut OpenModel,
    args: PrivateArgs,
    chats: usize,
    config: &Config,
) -> Result<(), Failure> {
    let (asked, taken) = chosen(model, args, config)?;
    let tells_tokens = model.file.spec().per_layer.is_some();
    if let Some(why) = said(asked, taken, tells_tokens) {
        note(why);
    }
    if taken == (0, 0) {
        return Ok(());
    }
    // Room for one more conversation than may run: a conversation may end shortly after the next
    // has started, and none may run out of memory.
    let chats = chats.saturating_add(1);
    let options = EngineOptions {
        max_kv_bytes: kv_bytes(model.file.spec(), chats),
        max_sequences: chats,
        ..config.engine_options(None)
    };
    let rows = config.research.distributed_inference.prefill_rows.0;
    model.private = PrivateLayers::load(&model.file, &model.id, taken, rows, &options)
        .map_err(|e| load_failure(&model.path, &e))?;
    Ok(())
}

/// Numbers of first and last layers that fit, of those requested. Leaves at least one layer to
/// hosts, and takes at most `budget` bytes of weights. First layers take precedence.
fn fit((first, last): (u32, u32), layer_bytes: &[u64], budget: u64) -> (u32, u32) {
    let most = layer_bytes.len().saturating_sub(1);
    let mut left = budget;
    let mut room = |layers: &mut dyn Iterator<Item = &u64>| {
        let fits = layers.take_while(|bytes| match left.checked_sub(**bytes) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        u32::try_from(fits.count()).unwrap_or(u32::MAX)
    };
    let first = room(&mut layer_bytes.iter().take(most.min(first as usize)));
    let most = most - first as usize;
    let last = room(&mut layer_bytes.iter().rev().take(most.min(last as usize)));
    (first, last)
}

/// Warning for the user if hosts can read the tokens, or there are fewer private layers than
/// requested. `tells_tokens`: the model has per-layer embeddings.
fn said(asked: (u32, u32), taken: (u32, u32), tells_tokens: bool) -> Option<String> {
    const READ: &str = "hosts of the first layer can read your questions and the answers exactly";
    match (asked, taken) {
        _ if tells_tokens => Some(
            "this model has per-layer embeddings: each of its hosts can read your questions and the \
             answers exactly, and private layers do not prevent it"
                .to_owned(),
        ),
        ((0, _), _) => Some(format!("no private first layers: {READ}")),
        (_, (0, _)) => Some(format!(
            "warning: this machine has no memory free for private layers: {READ}"
        )),
        _ if asked != taken => Some(format!(
            "private layers: the first {} and the last {} instead of {} and {}: there is no memory for more",
            taken.0, taken.1, asked.0, asked.1
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1 << 30;

    #[test]
    fn private_layers_are_limited_by_memory() {
        let layers = [GB; 30];
        assert_eq!(fit((2, 0), &layers, 64 * GB), (2, 0));
        assert_eq!(fit((2, 1), &layers, 64 * GB), (2, 1));
        assert_eq!(fit((2, 1), &layers, 2 * GB), (2, 0));
        assert_eq!(fit((2, 0), &layers, 2 * GB - 1), (1, 0));
        assert_eq!(fit((2, 0), &layers, GB - 1), (0, 0));
        assert_eq!(fit((0, 3), &layers, 64 * GB), (0, 3));
    }

    #[test]
    fn one_layer_is_left_to_hosts() {
        assert_eq!(fit((2, 0), &[GB; 2], 64 * GB), (1, 0));
        assert_eq!(fit((2, 2), &[GB; 4], 64 * GB), (2, 1));
        assert_eq!(fit((u32::MAX, u32::MAX), &[GB; 3], 64 * GB), (2, 0));
        assert_eq!(fit((2, 0), &[GB], 64 * GB), (0, 0));
        assert_eq!(fit((2, 0), &[], 64 * GB), (0, 0));
    }

    #[test]
    fn fewer_private_layers_than_requested_are_reported() {
        assert_eq!(said((2, 0), (2, 0), false), None);
        for (asked, taken) in [((0, 0), (0, 0)), ((2, 0), (0, 0)), ((0, 1), (0, 1))] {
            let said = said(asked, taken, false).expect("a line");
            assert!(said.contains("exactly"), "{said}");
        }
        let said_of_inputs = said((2, 0), (2, 0), true).expect("a line");
        assert!(said_of_inputs.contains("per-layer embeddings"));
        assert!(said((2, 1), (2, 0), false).is_some());
    }
}
