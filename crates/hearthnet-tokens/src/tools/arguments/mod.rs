//! Arguments of a call in a family's own form. Pure.
//!
//! ```text
//! <parameter=town>        {town:<|"|>Oslo<|"|>,days:2}        f(town='Oslo', days=2)
//! Oslo
//! </parameter> ...
//! ```
//!
//! | concept | where |
//! |---|---|
//! | a form, as data | [`Arguments`] |
//! | what the schema of an argument says about its form | `schema.rs` |
//! | grammar of the arguments of a tool | [`ArgumentGrammar`] |
//! | the arguments while they are written, as JSON | [`ArgumentReader`] |
//! | JSON arguments in the form | [`Arguments::written`] |

mod form;
mod gemma;
mod grammar;
mod json;
mod listed;
mod reader;
mod schema;
mod written;

pub(super) use form::{Arguments, Listed, Read};
pub(super) use grammar::ArgumentGrammar;
pub(super) use reader::ArgumentReader;
