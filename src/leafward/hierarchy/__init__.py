"""Taxonomies, hierarchical metrics, decisions, retrieval and embeddings of taxonomies.

from leafward.hierarchy import Taxonomy, metrics, decide, LorentzIndex
tax = Taxonomy.from_csv("catalogue.csv")
metrics.evaluate(tax, predicted, true)
LorentzIndex(H, points).search(queries, k=10)
"""

from leafward.hierarchy import decisions as decide
from leafward.hierarchy import metrics
from leafward.hierarchy.embedding import TaxonomyEmbedding
from leafward.hierarchy.index import Hits, LorentzIndex
from leafward.hierarchy.taxonomy import Taxonomy

__all__ = ["Hits", "LorentzIndex", "Taxonomy", "TaxonomyEmbedding", "decide", "metrics"]
