//! Configuration files: the commented example, the user's own, and the one that `hearthnet init`
//! writes.

use std::path::PathBuf;

/// The commented example; its values are the defaults.
pub(super) const EXAMPLE: &str = include_str!("../../../config/hearthnet.toml");

/// `$VARIABLE`, or `~/FALLBACK`; `None` without a home. A relative path is ignored, as the XDG base
/// directory specification demands.
pub(crate) fn xdg(variable: &str, fallback: &str) -> Option<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute(variable).or_else(|| absolute("HOME").map(|home| home.join(fallback)))
}

pub(crate) fn default_path() -> Option<PathBuf> {
    xdg("XDG_CONFIG_HOME", ".config").map(|d| d.join("hearthnet/hearthnet.toml"))
}

/// Initial configuration from the commented example: every key is commented out, so that later
/// defaults apply. `research` switches distributed inference on.
pub(crate) fn starter(research: bool) -> String {
    let mut out = String::from(
        "# This node's configuration. A line that begins with #KEY = VALUE shows a default;\n\
         # remove its # to change it. `hearthnet config show` prints what is in force.\n",
    );
    // The example's heading explains how to use the example, so it is left out.
    let body = EXAMPLE.split_once("\n\n").map_or("", |(_, body)| body);
    for line in body.lines() {
        out.push('\n');
        let is_key = !line.starts_with('#') && line.contains(" = ");
        if line == "enable = false" && research {
            out.push_str("enable = true");
        } else {
            out.push_str(if is_key { "#" } else { "" });
            out.push_str(line);
        }
    }
    out.push('\n');
    out
}
