//! `hearthnet config`: what is in force, and whether a file could be.

use std::fmt::Write as _;
use std::path::Path;

use hearthnet_model::ModelRef;

use crate::args::{Global, HostEngineArgs};
use crate::config::Loaded;
use crate::failure::{Failure, Kind};
use crate::host_engine::HostEngine;
use crate::models::find::resolve;
use crate::output::{note, print};
use crate::service_setup::http_settings;

pub(crate) fn show(loaded: &Loaded) -> Result<(), Failure> {
    let rows = loaded.explain()?;
    let width = rows
        .iter()
        .map(|(k, v, _)| k.len() + v.len())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for (key, value, origin) in rows {
        let pad = " ".repeat(width - key.len() - value.len());
        let _ = writeln!(out, "{key} = {value}{pad}   # {origin}");
    }
    print(out)
}

/// Reads a file as every command would and as `serve` does, and says how far it is from the defaults.
pub(crate) fn check(file: Option<&Path>, global: &Global) -> Result<(), Failure> {
    let loaded = Loaded::load(file.or(global.config.as_deref()), &global.set)?;
    let Some(path) = loaded.path() else {
        return Err(
            Failure::new(Kind::Config, "there is no configuration file to check")
                .hint("name one, or let `hearthnet init` write one; without any, defaults apply"),
        );
    };
    http_settings(&loaded.config.http.listen, &loaded.config)?;
    HostEngine::of(&HostEngineArgs::default(), &loaded.config)?;
    if let Some(model) = loaded.config.model.default() {
        named_model(global, &model)?;
    }
    let rows = loaded.explain()?;
    let set: Vec<_> = rows.iter().filter(|row| row.2 != "default").collect();
    let mut out = format!(
        "{} can be used; it sets {} of {} keys\n",
        path.display(),
        set.len(),
        rows.len()
    );
    for (key, value, _) in set {
        let _ = writeln!(out, "  {key} = {value}");
    }
    print(out)
}

/// Looks whether the model of `model.default` can be had. One that was not fetched yet is a note.
fn named_model(global: &Global, model: &ModelRef) -> Result<(), Failure> {
    let wrong = |why: &Failure| {
        Failure::new(Kind::Config, format!("model.default: {why}"))
            .hint(why.hint_text().unwrap_or_default())
    };
    match (resolve(global, model), model) {
        (Ok(_), _) => Ok(()),
        (Err(why), ModelRef::Path(_)) => Err(wrong(&why)),
        (Err(why), _) if why.kind == Kind::Model => {
            note(format!("model.default: {why}"));
            Ok(())
        }
        (Err(why), _) => Err(wrong(&why)),
    }
}
