//! `hearthnet http-key`: named keys for the HTTP interface. A running node reads their file when it
//! changes.

use hearthnet_http::ApiKey;
use hearthnet_platform::whole_file::{self, Access};
use serde_json::json;
use zeroize::Zeroizing;

use crate::answering::http::key_file;
use crate::cli::args::{AddKeyArgs, HttpKeyCommand};
use crate::cli::{Failure, Kind, failure, note, print_result, table};
use crate::config::Context;
use crate::home::{HttpKey, HttpKeys, refuse_open_to_others};

pub(crate) fn run(command: HttpKeyCommand, cx: &Context) -> Result<(), Failure> {
    let dir = cx.global.dir()?;
    let read = HttpKeys::read(&dir).map_err(|why| Failure::new(Kind::Refused, why));
    match command {
        HttpKeyCommand::Add(args) => {
            whole_file::make_folder(&dir, Access::Owner)
                .map_err(|e| Failure::file("make", &dir, e))?;
            refuse_open_to_others(&dir)?;
            let mut all = read?;
            let key = add(&mut all, &args)?;
            all.write(&dir)?;
            if key_file(&cx.config).is_none() {
                note(
                    "named keys are in force once http.api_key_file names the owner's key; until then every program of this machine may ask without a key",
                );
            }
            let shown = json!({"name": args.name, "key": key.as_str()});
            print_result(args.json, &shown, || format!("{}\n", key.as_str()))
        }
        HttpKeyCommand::List { json } => {
            let HttpKeys { keys } = read?;
            let shown = keys.iter().map(|key| {
                json!({
                    "name": key.name, "requests": key.requests,
                    "tokens_per_minute": key.tokens_per_minute, "tokens_per_day": key.tokens_per_day,
                })
            });
            let shown = json!({"keys": shown.collect::<Vec<_>>()});
            print_result(json, &shown, || list(&keys))
        }
        HttpKeyCommand::Remove { name, json } => {
            let mut all = read?;
            let before = all.keys.len();
            all.keys.retain(|key| key.name != name);
            if all.keys.len() == before {
                return Err(failure!(Config, "there is no key {name:?}")
                    .hint("`hearthnet http-key list` shows the keys"));
            }
            all.write(&dir)?;
            print_result(json, &json!({"removed": name}), || {
                format!("removed the key {name}\n")
            })
        }
    }
}

/// Adds a new key, and returns its text.
fn add(all: &mut HttpKeys, args: &AddKeyArgs) -> Result<Zeroizing<String>, Failure> {
    if all.keys.iter().any(|key| key.name == args.name) {
        return Err(failure!(Config, "there is a key {:?} already", args.name)
            .hint("remove it first, or choose another name"));
    }
    let mut bytes = Zeroizing::new([0_u8; 24]);
    getrandom::fill(bytes.as_mut_slice()).map_err(Failure::internal)?;
    let text = Zeroizing::new(format!("hn-{}", hex::encode(*bytes)));
    let key = ApiKey::new(&text).ok_or_else(|| Failure::internal("the key has a wrong form"))?;
    all.keys.push(HttpKey {
        name: args.name.clone(),
        sha256: key.digest(),
        requests: args.requests,
        tokens_per_minute: args.tokens_per_minute,
        tokens_per_day: args.tokens_per_day,
    });
    Ok(text)
}

fn list(keys: &[HttpKey]) -> String {
    if keys.is_empty() {
        return "no named keys; `hearthnet http-key add NAME` makes one\n".to_owned();
    }
    let limit = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let rows = keys.iter().map(|key| {
        [
            key.name.clone(),
            limit(key.requests.map(u64::from)),
            limit(key.tokens_per_minute),
            limit(key.tokens_per_day),
        ]
    });
    table(
        "key|requests at a time|tokens per minute|tokens per day",
        rows,
    )
}
