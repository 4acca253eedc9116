//! The budget of a rendering, and what a value costs.

use minijinja::value::{DynObject, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// What a rendering may handle, in bytes; an item counts as [`ITEM`]. A conversation of a thousand
/// messages of a thousand bytes takes 4 to 67 MiB in llama.cpp's collection of templates. One of
/// them, Reka-Edge, joins everything again at each message, and holds shorter ones only.
pub(super) const BUDGET: usize = 128 << 20;
/// What a value weighs beside its text: more than minijinja takes for one in a list.
pub(super) const ITEM: usize = 64;
/// How deep lists and dictionaries may be nested. Tool descriptions end at some ten levels.
const MAX_DEPTH: usize = 64;

/// The source of the error of a rendering whose budget is spent.
#[derive(Debug, thiserror::Error)]
#[error("the budget is spent")]
pub(super) struct Spent;

/// What is left of a rendering's budget.
struct Budget(usize);

pub(super) fn charge(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    let budget = state.get_or_insert_extension(Budget(BUDGET));
    match budget.0.checked_sub(bytes) {
        Some(left) => budget.0 = left,
        None => {
            return Err(Error::new(ErrorKind::InvalidOperation, "too much").with_source(Spent));
        }
    }
    Ok(())
}

pub(super) fn refuse(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Charges a value with everything in it, and tells how much that was.
pub(super) fn weigh(
    state: &mut State<'_, '_>,
    value: &Value,
    depth: usize,
) -> Result<usize, Error> {
    if depth > MAX_DEPTH {
        return Err(refuse("a value is nested too deep"));
    }
    if depth > 0 && value.as_object().is_some_and(changes) {
        return Err(refuse("a namespace or loop cannot be inside of a value"));
    }
    let mut weight = ITEM + value.as_str().map_or(0, str::len);
    charge(state, weight)?;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                weight += weigh(state, &item, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                weight += weigh(state, &key, depth + 1)?;
                weight += weigh(state, &value.get_item(&key)?, depth + 1)?;
            }
        }
        _ => {}
    }
    Ok(weight)
}

/// Whether an object is one of the two that are not what they were made as. Their types are
/// private to minijinja.
fn changes(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}
