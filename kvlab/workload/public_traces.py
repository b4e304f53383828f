"""Public traces by name: where each comes from, at which commit or release, its SHA-256, its licence and what to cite.

The checksum is that of the file as published (uncompressed). A file without one is trusted when it is first fetched; its digest is
reported, kept beside it and checked from then on. The files are not part of kvlab: their licences hold.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOONCAKE = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/0d1a8040faebb7c127c8901840a38c2ff57e80c5/FAST25-release/"
_QWEN = "https://media.githubusercontent.com/media/alibaba-edu/qwen-bailian-usagetraces-anon/5f7439c51ec248a0c585f7d90a41a6f57773b912/"
_AZURE_2023 = "https://raw.githubusercontent.com/Azure/AzurePublicDataset/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/"
_AZURE_2024 = "https://github.com/Azure/AzurePublicDataset/releases/download/dataset-llm-2024/"
_BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v2.0/"
_SHAREGPT = "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/192ab2185289094fc556ec8ce5ce1e8e587154ca/"

_CITE = {
    "mooncake": "Qin et al., Mooncake, FAST 2025",
    "qwen": "Wang et al., KVCache Cache in the Wild, USENIX ATC 2025",
    "splitwise": "Patel et al., Splitwise, ISCA 2024",
    "dynamollm": "Stojkovic et al., DynamoLLM, HPCA 2025",
    "burstgpt": "Wang et al., BurstGPT, 2024 (arXiv 2401.17644)",
    "sharegpt": "ShareGPT conversations, as cleaned for Vicuna (2023)",
}


@dataclass(frozen=True)
class PublicTrace:
    """One file. `file_name`: what it is called here. `sha256`: None where its publisher states none. `num_mb`: about, to download."""

    name: str
    file_name: str
    url: str
    sha256: str | None
    num_mb: int
    licence: str
    citation: str


def _rows() -> list[PublicTrace]:
    def row(name: str, ending: str, url: str, sha256: str | None, num_mb: int, licence: str, cite: str) -> PublicTrace:
        return PublicTrace(name, name + ending, url, sha256, num_mb, licence, _CITE[cite])

    return [
        row("mooncake_conversation", ".jsonl", _MOONCAKE + "traces/conversation_trace.jsonl",
            "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df", 3, "Apache-2.0", "mooncake"),
        row("mooncake_synthetic", ".jsonl", _MOONCAKE + "traces/synthetic_trace.jsonl",
            "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131", 1, "Apache-2.0", "mooncake"),
        row("mooncake_toolagent", ".jsonl", _MOONCAKE + "traces/toolagent_trace.jsonl",
            "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71", 6, "Apache-2.0", "mooncake"),
        row("qwen_bailian_a", ".jsonl", _QWEN + "qwen_traceA_blksz_16.jsonl",
            "07cedc9ed8aff301994ac68ed4aede8123b7603673575eeba9dd677de663db17", 56, "Apache-2.0", "qwen"),
        row("qwen_bailian_b", ".jsonl", _QWEN + "qwen_traceB_blksz_16.jsonl",
            "68e3f98e2d601d60d0abf4b89bc8a3654372abab7b1cde6373a13d0054379d59", 96, "Apache-2.0", "qwen"),
        row("qwen_bailian_coder", ".jsonl", _QWEN + "qwen_coder_blksz_16.jsonl",
            "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff", 132, "Apache-2.0", "qwen"),
        row("qwen_bailian_thinking", ".jsonl", _QWEN + "qwen_thinking_blksz_16.jsonl",
            "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906", 28, "Apache-2.0", "qwen"),
        row("azure_2023_code", ".csv", _AZURE_2023 + "AzureLLMInferenceTrace_code.csv",
            "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6", 1, "CC BY 4.0", "splitwise"),
        row("azure_2023_conv", ".csv", _AZURE_2023 + "AzureLLMInferenceTrace_conv.csv",
            "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8", 1, "CC BY 4.0", "splitwise"),
        row("azure_2024_code", ".csv", _AZURE_2024 + "AzureLLMInferenceTrace_code_1week.csv",
            "71de5c55cbc35f8f1ed0b6b7806b4cd1e9764b0058469725a6aac98023a1448f", 660, "CC BY 4.0", "dynamollm"),
        row("azure_2024_conv", ".csv", _AZURE_2024 + "AzureLLMInferenceTrace_conv_1week.csv",
            "a0cc9b969a9bbf0fd811802cbf4323edd3a209ace791e3799ad4f9207f213941", 1135, "CC BY 4.0", "dynamollm"),
        row("burstgpt_1", ".csv", _BURSTGPT + "BurstGPT_1.csv",
            "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122", 52, "CC BY 4.0", "burstgpt"),
        row("burstgpt_2", ".csv", _BURSTGPT + "BurstGPT_2.csv",
            "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7", 145, "CC BY 4.0", "burstgpt"),
        row("burstgpt_3", ".csv", _BURSTGPT + "BurstGPT_3.csv",
            "2299986a07388aa303ec2c41d1131e756db650a39ed6ef9dfe7cc3d7f9a43b8f", 232, "CC BY 4.0", "burstgpt"),
        row("sharegpt_v3", ".json", _SHAREGPT + "ShareGPT_V3_unfiltered_cleaned_split.json",
            None, 673, "Apache-2.0 (as declared)", "sharegpt"),
    ]  # fmt: skip


PUBLIC_TRACES: dict[str, PublicTrace] = {trace.name: trace for trace in _rows()}
"""Name -> trace."""


def table() -> str:
    """The traces as text: name, size, licence, checksum, what to cite."""
    lines = [f"{'name':24}{'MB':>6}  {'licence':26}{'SHA-256':18}  cite"]
    for trace in PUBLIC_TRACES.values():
        digest = "at first fetch" if trace.sha256 is None else f"{trace.sha256[:12]}..."
        lines.append(f"{trace.name:24}{trace.num_mb:>6}  {trace.licence:26}{digest:18}  {trace.citation}")
    return "\n".join(lines)
