//! Answers of Prometheus to an instant query.

use serde::Deserialize;
use serde_json::Value;

/// Stands for infinity.
const INFINITE: f64 = 1e300;

#[derive(Deserialize)]
struct Answer {
    status: String,
    #[serde(default)]
    error: String,
    data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "resultType")]
    kind: String,
    result: Value,
}

/// Returns the value of an answer: the highest of several series, `None` if there is none. What is not a number (`NaN`) is no
/// value; a negative one is 0, and an infinite one (the quantile of a histogram whose last bucket is hit) very
/// large.
pub(super) fn value(body: &[u8]) -> Result<Option<f64>, String> {
    let answer: Answer = serde_json::from_slice(body)
        .map_err(|_| "it does not answer as Prometheus does, or at greater length than 64 KiB".to_owned())?;
    let data = match answer.data {
        Some(data) if answer.status == "success" => data,
        _ => return Err(format!("it answers: {}", answer.error)),
    };
    let values: Vec<f64> = match data.kind.as_str() {
        "scalar" => number(&data.result).into_iter().collect(),
        "vector" => {
            let series = data.result.as_array().map_or(&[][..], |series| series);
            series.iter().filter_map(|one| number(one.get("value")?)).collect()
        }
        other => {
            return Err(format!("the query returns a {other}; write one that returns a number or a vector"));
        }
    };
    Ok(values.into_iter().map(|value| value.clamp(0.0, INFINITE)).reduce(f64::max))
}

/// Returns the number of a sample: a time, and the value as text.
fn number(sample: &Value) -> Option<f64> {
    sample.get(1)?.as_str()?.parse().ok().filter(|value: &f64| !value.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(kind: &str, result: &Value) -> Result<Option<f64>, String> {
        value(
            json!({"status": "success", "data": {"resultType": kind, "result": result}})
                .to_string()
                .as_bytes(),
        )
    }

    #[test]
    fn the_highest_series_counts() {
        let series = |value: &str| json!({"metric": {}, "value": [1_700_000_000.5, value]});
        assert_eq!(of("vector", &json!([series("1"), series("250.5"), series("NaN")])), Ok(Some(250.5)));
        assert_eq!(of("vector", &json!([])), Ok(None));
        assert_eq!(of("vector", &json!([series("NaN")])), Ok(None));
        assert_eq!(of("vector", &json!([series("+Inf")])), Ok(Some(INFINITE)));
        assert_eq!(of("vector", &json!([series("-3")])), Ok(Some(0.0)));
        assert_eq!(of("scalar", &json!([1, "7"])), Ok(Some(7.0)));
    }

    #[test]
    fn what_is_no_value_is_an_error_that_says_so() {
        assert!(of("matrix", &json!([])).expect_err("a matrix").contains("matrix"));
        let wrong = json!({"status": "error", "errorType": "bad_data", "error": "parse error"}).to_string();
        assert!(value(wrong.as_bytes()).expect_err("an error").contains("parse error"));
        for other in [&b""[..], b"<html>", b"{}", b"[1]"] {
            assert!(value(other).expect_err("no answer").contains("Prometheus"));
        }
    }
}
